// Ledger: who owns which page of which node, what each byte of it must become, and how often it was written.
//
// It judges every byte that lands: a page that is free, a byte that is not its owner's, a page that is called whole and
// is not, or was written twice. It hears of a byte from whoever lands it (land), or finds it: memory holds a trap, which
// is never what belongs there, and what the trap no longer says was written (notice). A decoder's life and a prefiller's
// life each have one pool; a life is a number that is never used again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "run.h"

namespace sim {

struct Shape {
    uint32_t layers = 1;
    uint32_t pages = 1;
    uint32_t page_bytes = 32;

    uint64_t layer_stride() const { return static_cast<uint64_t>(pages) * page_bytes; }
    uint64_t bytes() const { return layers * layer_stride(); }
};

// Byte `offset` of page `index` of prompt `prompt` in a layer.
inline uint8_t content(uint64_t prompt, uint32_t layer, uint32_t index, uint32_t offset) {
    uint64_t z = prompt * 0x9e3779b97f4a7c15 + layer * 0xd1342543de82ef95 + index * 0x2545f4914f6cdd1d;
    z = (z ^ (z >> 29)) * 0xbf58476d1ce4e5b9 + offset * 0x94d049bb133111eb;
    return static_cast<uint8_t>(z >> 33);
}

class Ledger {
  public:
    explicit Ledger(Run& run) : run_(run) {}

    void add_pool(uint32_t life, uint8_t* base, Shape shape);
    void drop_pool(uint32_t life) { pools_.erase(life); }

    // Page i of the prompt is `pages[i]`; the pages from `whole_pages` on have content in layer 0 only.
    void reserve(uint32_t life, uint64_t prompt, const std::vector<uint32_t>& pages, uint32_t whole_pages);
    void release(uint32_t life, const std::vector<uint32_t>& pages);
    // Every byte is there, and was written once.
    void check_whole(uint32_t life, uint64_t prompt, const std::vector<uint32_t>& pages);

    bool owns(uint32_t life, const uint8_t* at) const;
    void land(uint32_t life, const uint8_t* to, const uint8_t* data, size_t nbytes);
    // What was copied into the pool by somebody who does not say so, and who may read pages that were given back as
    // long as he calls nothing whole: `torn`.
    void notice(uint32_t life, bool torn);

  private:
    struct Page {
        uint64_t prompt = 0;  // 0: free
        uint32_t index = 0;
        uint32_t layers = 0;
    };
    struct Pool {
        uint8_t* base;
        Shape shape;
        std::vector<Page> pages;
        std::vector<uint8_t> hits;   // per byte of the region
        std::vector<uint8_t> bytes;  // as they landed
        std::vector<uint8_t> trap;   // what memory holds
    };
    void take(Pool& pool, uint32_t life, size_t at, uint8_t byte, bool torn);

    Run& run_;
    std::unordered_map<uint32_t, Pool> pools_;
};

}  // namespace sim
