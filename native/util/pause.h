// cpu_pause(): tells the core that this is a spin loop.
#pragma once

namespace pdd {

inline void cpu_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace pdd
