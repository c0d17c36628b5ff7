// Op: one posted write, and the context that libfabric hands back with its completion. OpPool: a slab of them.
//
// The provider writes into the context while the write is in flight, so its address must not move and it must come
// first. Outstanding ops of one owner form a list, so that closing an endpoint can account for each of them.
#pragma once

#include <rdma/fabric.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace pdd {

class Transfer;

struct Op {
    fi_context2 context;
    Op* prev = nullptr;  // neighbours in the list of outstanding ops, or next free
    Op* next = nullptr;
    Transfer* transfer = nullptr;  // null: not in flight
    uint64_t nbytes = 0;
    uint64_t record = 0;  // in the flight log
    uint32_t units = 0;
    uint32_t lane = 0;  // that it was posted on
    bool held = false;  // fault "hold": its completion is withheld
};
static_assert(offsetof(Op, context) == 0);

// Doubly linked, does not own.
class OpList {
  public:
    bool empty() const { return head_ == nullptr; }
    Op* front() const { return head_; }  // and on by `next`
    void push(Op* op) {
        op->prev = nullptr;
        op->next = head_;
        if (head_ != nullptr) head_->prev = op;
        head_ = op;
    }
    void remove(Op* op) {
        (op->prev != nullptr ? op->prev->next : head_) = op->next;
        if (op->next != nullptr) op->next->prev = op->prev;
    }

  private:
    Op* head_ = nullptr;
};

class OpPool {
  public:
    Op* take() {
        if (free_ == nullptr) grow();
        Op* op = free_;
        free_ = op->next;
        *op = Op{};
        return op;
    }
    void give(Op* op) {
        op->transfer = nullptr;
        op->next = free_;
        free_ = op;
    }

  private:
    static constexpr size_t kBlock = 256;
    void grow() {
        blocks_.push_back(std::make_unique<std::array<Op, kBlock>>());
        for (Op& op : *blocks_.back()) give(&op);
    }
    std::vector<std::unique_ptr<std::array<Op, kBlock>>> blocks_;
    Op* free_ = nullptr;
};

}  // namespace pdd
