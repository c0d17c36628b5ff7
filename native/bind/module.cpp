// The Python module pdd.fabric._native.
#include "bind/binding.h"
#include "fabric/events.h"
#include "fabric/imm_table.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
    nb::exception<pdd::FabricError>(m, "FabricError", PyExc_RuntimeError);
    m.attr("IMM_MAX_UNITS") = pdd::kImmMaxUnits;
    m.attr("KEY_BITS") = pdd::kKeyBits;
    m.attr("IMM_REACHED") = static_cast<int>(pdd::EventKind::ImmReached);
    m.attr("IMM_OVERRUN") = static_cast<int>(pdd::EventKind::ImmOverrun);
    m.attr("TRANSFER_DONE") = static_cast<int>(pdd::EventKind::TransferDone);
    m.attr("ENDPOINT_FAILED") = static_cast<int>(pdd::EventKind::EndpointFailed);
    m.attr("ENDPOINT_CLOSED") = static_cast<int>(pdd::EventKind::EndpointClosed);
    pdd::bind_libraries(m);
    pdd::bind_memory(m);
    pdd::bind_gpu(m);
    pdd::bind_plan(m);
    pdd::bind_fabric(m);
}
