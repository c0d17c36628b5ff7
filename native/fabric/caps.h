// ProviderCaps: what one fi_info of one library really offers, flags and known lies already sorted out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pdd {

inline constexpr size_t kMaxNics = 32;  // of one Fabric, and of one descriptor

struct ProviderCaps {
    std::string provider;  // as this library calls it
    std::string kind;      // as an operator calls it: efa, verbs, tcp, shm
    std::string wire;      // nodes whose wire is equal understand each other ("tcp" is both 1.17's net and 2.x's tcp)
    std::string fabric;
    std::string domain;
    std::string address;  // numeric address, empty where the provider has none to show
    std::string library_version;
    std::string library_path;
    uint32_t imm_bytes = 0;
    bool virtual_addressing =
        false;              // remote address = the peer's virtual address; else an offset from its region's start
    bool app_keys = false;  // we choose the keys of regions; else the provider does
    bool local_mr = false;  // sources must be registered and carry a descriptor
    std::string progress;   // as the provider says; none lands data unless the target polls (a test says so)
    size_t tx_size = 0;
    size_t inject = 0;
    size_t iov_limit = 0;
    size_t rma_iov_limit = 0;
    size_t write_segments = 1;  // scattered pages that one write may carry
    size_t max_message = 0;
    bool wait_fd = false;      // from opening a queue, not from a flag
    bool sticky_wait = false;  // the queue's descriptor stays readable after a completion, see Sleeper
    int max_sleep_ms = 200;    // how long an idle node may go without a look at its queues
    bool hmem = false;
    bool dmabuf = false;
    std::string gpu_path;      // to the memory of the engine's GPU: dmabuf, hmem, staged; "" for host memory only
    std::string gpu_path_why;  // nothing better
    std::string fence;         // "endpoint": closing one stops its peer's writes. "none": nothing does (shm)
};

}  // namespace pdd
