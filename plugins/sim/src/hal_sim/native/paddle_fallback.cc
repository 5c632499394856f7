// Counts operators that Paddle ran on the CPU because this device has no kernel for them.
//
// Paddle does not report a fallback; it moves the results to the device with one function that serves nothing
// else. A synchronous copy to the device with that function on the call stack is therefore one result of a fallback.
#include <dlfcn.h>
#include <elf.h>
#include <execinfo.h>
#include <link.h>

#include "paddle_device.h"

namespace halsim {

namespace {

struct Code {
  uintptr_t begin = 0, end = 0;
};

Code find_result_mover() {
  void* core = dlopen("libphi_core.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!core) return {};
  // paddle::experimental::TransDataBackend(phi::DenseTensor const*, Backend, phi::DenseTensor*)
  void* at = dlsym(core, "_ZN6paddle12experimental16TransDataBackendEPKN3phi11DenseTensorENS0_7BackendEPS2_");
  Dl_info info;
  const ElfW(Sym)* symbol = nullptr;
  if (!at || !dladdr1(at, &info, reinterpret_cast<void**>(const_cast<ElfW(Sym)**>(&symbol)), RTLD_DL_SYMENT) ||
      !symbol) {
    return {};
  }
  const auto begin = reinterpret_cast<uintptr_t>(at);
  return {begin, begin + symbol->st_size};
}

}  // namespace

void count_if_fallback() {
  static const Code mover = find_result_mover();
  if (!mover.begin) return;
  void* frames[24];
  const int n = backtrace(frames, 24);
  for (int i = 0; i < n; ++i) {
    const auto at = reinterpret_cast<uintptr_t>(frames[i]);
    if (at > mover.begin && at <= mover.end) return count(Kind::fallback);
  }
}

}  // namespace halsim
