#include "ledger.h"

#include <cstring>

namespace sim {
namespace {

std::string where(uint32_t life, uint32_t layer, uint32_t page) {
    return "layer " + std::to_string(layer) + " of page " + std::to_string(page) + " of life " + std::to_string(life);
}

}  // namespace

void Ledger::add_pool(uint32_t life, uint8_t* base, Shape shape) {
    pools_[life] = {base,
                    shape,
                    std::vector<Page>(shape.pages),
                    std::vector<uint8_t>(shape.bytes()),
                    std::vector<uint8_t>(shape.bytes()),
                    std::vector<uint8_t>(base, base + shape.bytes())};
}

void Ledger::reserve(uint32_t life, uint64_t prompt, const std::vector<uint32_t>& pages, uint32_t whole_pages) {
    Pool& pool = pools_.at(life);
    for (uint32_t i = 0; i < pages.size(); ++i) {
        Page& page = pool.pages[pages[i]];
        if (page.prompt != 0) run_.violate("page " + std::to_string(pages[i]) + " was given out twice");
        page = {prompt, i, i < whole_pages ? pool.shape.layers : 1};
        for (uint32_t layer = 0; layer < pool.shape.layers; ++layer) {
            const size_t at = layer * pool.shape.layer_stride() + size_t{pages[i]} * pool.shape.page_bytes;
            std::memset(&pool.hits[at], 0, pool.shape.page_bytes);
            for (uint32_t offset = 0; offset < pool.shape.page_bytes; ++offset)
                pool.base[at + offset] = pool.trap[at + offset] =
                    static_cast<uint8_t>(~content(prompt, layer, i, offset));
        }
    }
}

void Ledger::release(uint32_t life, const std::vector<uint32_t>& pages) {
    for (const uint32_t page : pages) pools_.at(life).pages[page] = {};
}

void Ledger::check_whole(uint32_t life, uint64_t prompt, const std::vector<uint32_t>& pages) {
    const Pool& pool = pools_.at(life);
    for (const uint32_t number : pages) {
        const Page& page = pool.pages[number];
        for (uint32_t layer = 0; layer < page.layers; ++layer) {
            const size_t at = layer * pool.shape.layer_stride() + size_t{number} * pool.shape.page_bytes;
            for (uint32_t i = 0; i < pool.shape.page_bytes; ++i) {
                if (pool.hits[at + i] != 1)
                    return run_.violate("prompt " + std::to_string(prompt) + " is called whole, but byte " +
                                        std::to_string(i) + " of " + where(life, layer, number) + " was written " +
                                        std::to_string(pool.hits[at + i]) + " times");
                if (pool.bytes[at + i] != content(prompt, layer, page.index, i))
                    return run_.violate("prompt " + std::to_string(prompt) + " is called whole, but " +
                                        where(life, layer, number) + " holds something else");
            }
        }
    }
}

bool Ledger::owns(uint32_t life, const uint8_t* at) const {
    const auto found = pools_.find(life);
    if (found == pools_.end()) return false;
    const Pool& pool = found->second;
    return at >= pool.base && at < pool.base + pool.shape.bytes();
}

void Ledger::take(Pool& pool, uint32_t life, size_t at, uint8_t byte, bool torn) {
    const auto layer = static_cast<uint32_t>(at / pool.shape.layer_stride());
    const auto number = static_cast<uint32_t>(at % pool.shape.layer_stride() / pool.shape.page_bytes);
    const Page& page = pool.pages[number];
    const auto offset = static_cast<uint32_t>(at % pool.shape.page_bytes);
    if (page.prompt == 0)
        return run_.violate("a write landed in a page freed before: " + where(life, layer, number));
    if (byte != content(page.prompt, layer, page.index, offset) && !torn)
        return run_.violate("a write that is not of prompt " + std::to_string(page.prompt) + " landed in its " +
                            where(life, layer, number));
    pool.hits[at] += pool.hits[at] < 255 ? 1 : 0;
    pool.bytes[at] = byte;
}

void Ledger::land(uint32_t life, const uint8_t* to, const uint8_t* data, size_t nbytes) {
    Pool& pool = pools_.at(life);
    const auto at = static_cast<size_t>(to - pool.base);
    if (to < pool.base || at + nbytes > pool.shape.bytes())
        return run_.violate("a write landed outside the region of life " + std::to_string(life));
    for (size_t i = 0; i < nbytes && run_.good(); ++i) take(pool, life, at + i, data[i], false);
}

void Ledger::notice(uint32_t life, bool torn) {
    Pool& pool = pools_.at(life);
    if (std::memcmp(pool.base, pool.trap.data(), pool.trap.size()) == 0) return;
    for (size_t at = 0; at < pool.trap.size() && run_.good(); ++at) {
        if (pool.base[at] == pool.trap[at]) continue;
        take(pool, life, at, pool.base[at], torn);
        pool.base[at] = pool.trap[at];
    }
}

}  // namespace sim
