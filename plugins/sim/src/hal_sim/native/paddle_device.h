// The Paddle side, in a library of its own: libhalsim.so knows nothing of Paddle and serves the ctypes layer too.
#pragma once
#include "journal.h"
#include "paddle/phi/backends/device_ext.h"

namespace halsim {

C_Status to_paddle(Status status);  // prints the reason, as Paddle's error is a bare number
void count_if_fallback();
void fill_collectives(C_DeviceInterface* device);
void register_paddle_kernels(const char* device_type);

}  // namespace halsim
