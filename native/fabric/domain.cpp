#include "fabric/domain.h"

#include <rdma/fi_errno.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include "fabric/fabric_port.h"
#include "gpu/device_memory.h"

namespace pdd {
namespace {

constexpr uint32_t kTrialQueue = 64;
constexpr int kKeyAttempts = 8;

uint64_t random_key() {
    std::random_device source;
    return static_cast<uint64_t>(source()) << 32 | source();
}

class FabricMemory final : public NicMemory {
  public:
    explicit FabricMemory(Fid<fid_mr> mr) : mr_(std::move(mr)) {
        key = ::fi_mr_key(mr_.get());
        descriptor = ::fi_mr_desc(mr_.get());
    }
    int close() override { return mr_.close(); }

  private:
    Fid<fid_mr> mr_;
};

// What the headers of 1.17 do not know yet: memory given as a dma-buf (1.20). The ABI is that of 2.x; older members
// keep their places.
constexpr uint64_t kMrDmabuf = 1ull << 40;
struct DmabufRange {
    int fd;
    uint64_t offset;
    size_t length;
    void* base;
};
struct NewerMrAttr {
    fi_mr_attr known;
    void* hmem_data;
    size_t page_size;
    const fid_mr* base_mr;
    size_t sub_mr_cnt;
    char newer[64];
};
static_assert(offsetof(fi_mr_attr, mr_iov) == 0 && offsetof(fi_mr_attr, iface) == 64);
static_assert(sizeof(fi_mr_attr) >= 80);

std::string locked_memory_hint() {
    rlimit limit{};
    if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
    return " (locked-memory limit: " + std::to_string(limit.rlim_cur >> 10) +
           " KiB; raise it with LimitMEMLOCK=infinity or ulimit -l unlimited)";
}

}  // namespace

Domain::Domain(std::shared_ptr<const Library> library, NicOffer offer)
    : library_(std::move(library)), info_(std::move(offer.info)), caps_(std::move(offer.caps)) {}

Result<std::unique_ptr<Domain>> Domain::open(std::shared_ptr<const Library> library, NicOffer offer) {
    std::unique_ptr<Domain> domain(new Domain(std::move(library), std::move(offer)));
    int rc = domain->library_->fabric(domain->info_->fabric_attr, domain->fabric_.out(), nullptr);
    if (rc != 0) return domain->error("fi_fabric", rc);
    rc = ::fi_domain(domain->fabric_.get(), domain->info_.get(), domain->domain_.out(), nullptr);
    if (rc != 0) return domain->error("fi_domain", rc);

    // Flags and types say too much: a NIC counts only once an endpoint of it opens, and only the queue knows whether it
    // can be waited for.
    auto rail = domain->open_rail(kTrialQueue);
    if (!rail) return rail.error();
    domain->caps_.wait_fd = rail->wait_fd >= 0;
    return domain;
}

Result<std::unique_ptr<NicMemory>> Domain::register_memory(uint8_t* base, uint64_t nbytes, Access access) {
    uint64_t flags = 0;
    if (access != Access::Remote) flags |= FI_WRITE;
    if (access != Access::Local) flags |= FI_REMOTE_WRITE;
    int rc = 0;
    for (int attempt = 0; attempt < kKeyAttempts; ++attempt) {
        Fid<fid_mr> mr;
        const uint64_t key = caps_.app_keys ? random_key() : 0;
        rc = device_ != nullptr && device_->is_device_memory(reinterpret_cast<uintptr_t>(base))
                 ? register_device(base, nbytes, flags, key, mr.out())
                 : ::fi_mr_reg(domain_.get(), base, nbytes, flags, 0, key, 0, mr.out(), nullptr);
        if (rc == 0) return std::unique_ptr<NicMemory>(new FabricMemory(std::move(mr)));
        if (rc != -FI_ENOKEY) break;  // ENOKEY: this key is taken
    }
    Error error = this->error("fi_mr_reg of " + std::to_string(nbytes) + " bytes", rc);
    if (rc == -FI_ENOMEM || rc == -FI_EPERM) error.message += locked_memory_hint();
    return error;
}

int Domain::register_device(uint8_t* base, uint64_t nbytes, uint64_t access, uint64_t key, fid_mr** mr) {
    // Copies that the driver makes of this memory end before they return: a NIC beside them sees whole bytes.
    const unsigned sync = 1;
    device_->cu().cuPointerSetAttribute(&sync, cuda::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
                                        reinterpret_cast<uintptr_t>(base));
    NewerMrAttr attr{};
    attr.known.iov_count = 1;
    attr.known.access = access;
    attr.known.requested_key = key;
    attr.known.iface = FI_HMEM_CUDA;
    attr.known.device.cuda = device_->ordinal();
    if (caps_.gpu_path == "dmabuf") {
        const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
        auto fd = device_->dmabuf(reinterpret_cast<uintptr_t>(base), (nbytes + page - 1) / page * page);
        if (!fd) return -fd.error().code;
        const DmabufRange range{fd->get(), 0, nbytes, base};  // the registration holds the buffer, not the descriptor
        attr.known.mr_iov = reinterpret_cast<const iovec*>(&range);
        return ::fi_mr_regattr(domain_.get(), &attr.known, kMrDmabuf, mr);
    }
    const iovec range{base, nbytes};
    attr.known.mr_iov = &range;
    return ::fi_mr_regattr(domain_.get(), &attr.known, 0, mr);
}

Status Domain::reach(std::shared_ptr<const GpuDevice> device) {
    auto trial = DeviceMemory::allocate(device, 1);
    if (!trial) return trial.error();
    device_ = std::move(device);
    std::string tried;
    for (const char* path : {"dmabuf", "hmem"}) {
        caps_.gpu_path = path;
        if (caps_.gpu_path == "dmabuf" && !caps_.dmabuf) {
            tried += "; dma-buf needs libfabric 1.20, this is " + caps_.library_version;
            continue;
        }
        auto memory = register_memory(reinterpret_cast<uint8_t*>(trial->address()), trial->nbytes(), Access::Both);
        if (memory) return {};
        tried += std::string("; ") + path + ": " + memory.error().message;
    }
    caps_.gpu_path = "";
    device_ = nullptr;
    return Error{"NIC " + name() + " does not reach GPU memory" + tried, FI_EOPNOTSUPP};
}

Result<std::unique_ptr<NicPort>> Domain::open_port(uint32_t queue) {
    auto rail = open_rail(queue);
    if (!rail) return rail.error();
    return std::unique_ptr<NicPort>(new FabricPort(*this, std::move(*rail)));
}

Result<Rail> Domain::open_rail(uint32_t queue) {
    Rail rail;
    fi_av_attr av_attr{};
    av_attr.type = FI_AV_TABLE;
    int rc = ::fi_av_open(domain_.get(), &av_attr, rail.av.out(), nullptr);
    if (rc != 0) return error("fi_av_open", rc);

    fi_cq_attr cq_attr{};
    cq_attr.format = FI_CQ_FORMAT_DATA;
    cq_attr.size = std::max<size_t>(queue, info_->tx_attr->size);
    cq_attr.wait_obj = FI_WAIT_FD;
    rc = ::fi_cq_open(domain_.get(), &cq_attr, rail.cq.out(), nullptr);
    if (rc == 0 && ::fi_control(&rail.cq->fid, FI_GETWAIT, &rail.wait_fd) != 0) rail.wait_fd = -1;
    if (rc != 0) {  // shm has nothing to wait for
        cq_attr.wait_obj = FI_WAIT_NONE;
        rc = ::fi_cq_open(domain_.get(), &cq_attr, rail.cq.out(), nullptr);
    }
    if (rc != 0) return error("fi_cq_open", rc);

    rc = ::fi_endpoint(domain_.get(), info_.get(), rail.ep.out(), nullptr);
    if (rc != 0) return error("fi_endpoint", rc);
    rc = ::fi_ep_bind(rail.ep.get(), &rail.av->fid, 0);
    if (rc != 0) return error("fi_ep_bind of the address vector", rc);
    rc = ::fi_ep_bind(rail.ep.get(), &rail.cq->fid, FI_TRANSMIT | FI_RECV);
    if (rc != 0) return error("fi_ep_bind of the completion queue", rc);
    rc = ::fi_enable(rail.ep.get());
    if (rc != 0) return error("fi_enable", rc);

    size_t length = 0;
    rc = ::fi_getname(&rail.ep->fid, nullptr, &length);
    if (rc != -FI_ETOOSMALL && rc != 0) return error("fi_getname", rc);
    rail.address.resize(length);
    rc = ::fi_getname(&rail.ep->fid, rail.address.data(), &length);
    if (rc != 0) return error("fi_getname", rc);
    rail.address.resize(length);
    return rail;
}

}  // namespace pdd
