// Kernels written as plain C functions, found by name or given as a pointer.
//
// A function gets a copy of its argument bytes and reaches device memory through `halsim_kernel_read` and
// `halsim_kernel_write` alone, so that its accesses are checked and noted like those of every other kernel.
#pragma once
#include "kernels.h"

extern "C" {
struct halsim_kernel;  // a halsim::Kernel
typedef void (*halsim_function)(halsim_kernel* kernel, const void* arguments, size_t bytes);
const void* halsim_kernel_read(halsim_kernel* kernel, uint64_t address, size_t bytes);
void* halsim_kernel_write(halsim_kernel* kernel, uint64_t address, size_t bytes);
void halsim_kernel_fail(halsim_kernel* kernel, const char* text);
}

namespace halsim {

void register_function(const char* name, halsim_function function);
halsim_function find_function(const char* name);
Status launch_function(Stream* stream, halsim_function function, const void* arguments, size_t bytes);

// A file of its own for each larger kernel: define the function there and one of these at the end of the file.
struct RegisterFunction {
  RegisterFunction(const char* name, halsim_function function) { register_function(name, function); }
};

}  // namespace halsim
