// CHECK: ends the test program with the place and the text of what is not so. Works in every build type.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(what)                                                                 \
    do {                                                                            \
        if (!(what)) {                                                              \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #what); \
            std::exit(1);                                                           \
        }                                                                           \
    } while (false)
