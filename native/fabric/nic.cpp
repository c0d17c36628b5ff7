#include "fabric/nic.h"

namespace pdd {

Error Nic::error(const std::string& operation, int code) const {
    return Error{operation + " (provider " + caps().provider + ", NIC " + name() + "): " + error_text(code),
                 code < 0 ? -code : code};
}

}  // namespace pdd
