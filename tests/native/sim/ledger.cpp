#include "ledger.h"

#include <cstring>

namespace sim {
namespace {

std::string where(uint32_t life, uint32_t layer, uint32_t page) {
    return "layer " + std::to_string(layer) + " of page " + std::to_string(page) + " of life " + std::to_string(life);
}

}  // namespace

void Ledger::add_pool(uint32_t life, uint8_t* base, Shape shape) {
    pools_[life] = {base, shape, std::vector<Page>(shape.pages), std::vector<uint8_t>(shape.bytes())};
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
            std::memset(pool.base + at, 0, pool.shape.page_bytes);
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
                if (pool.base[at + i] != content(prompt, layer, page.index, i))
                    return run_.violate("prompt " + std::to_string(prompt) + " is called whole, but " +
                                        where(life, layer, number) + " holds something else");
            }
        }
    }
}

void Ledger::land(uint32_t life, uint8_t* to, const uint8_t* data, size_t nbytes) {
    Pool& pool = pools_.at(life);
    const auto at = static_cast<size_t>(to - pool.base);
    if (to < pool.base || at + nbytes > pool.shape.bytes())
        return run_.violate("a write landed outside the region of life " + std::to_string(life));
    for (size_t i = at; i < at + nbytes; ++i) {
        const auto layer = static_cast<uint32_t>(i / pool.shape.layer_stride());
        const auto number = static_cast<uint32_t>(i % pool.shape.layer_stride() / pool.shape.page_bytes);
        const Page& page = pool.pages[number];
        const auto offset = static_cast<uint32_t>(i % pool.shape.page_bytes);
        if (page.prompt == 0)
            return run_.violate("a write landed in a page freed before: " + where(life, layer, number));
        if (data[i - at] != content(page.prompt, layer, page.index, offset))
            return run_.violate("a write that is not of prompt " + std::to_string(page.prompt) + " landed in its " +
                                where(life, layer, number));
        pool.hits[i] += pool.hits[i] < 255 ? 1 : 0;
        pool.base[i] = data[i - at];
    }
}

}  // namespace sim
