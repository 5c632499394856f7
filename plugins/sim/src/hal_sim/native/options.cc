#include "options.h"

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <string>

namespace halsim {

Options options;

std::atomic<long>* find_option(const char* name) {
#define HALSIM_FIND(option, value) \
  if (!std::strcmp(name, #option)) return &options.option;
  HALSIM_OPTIONS(HALSIM_FIND)
#undef HALSIM_FIND
  return nullptr;
}

static void load(const char* name, std::atomic<long>& option) {
  std::string variable = "HALSIM_";
  for (const char* c = name; *c; ++c) variable += static_cast<char>(std::toupper(*c));
  if (const char* value = std::getenv(variable.c_str())) option = std::atol(value);
}

void load_options_from_environment() {
#define HALSIM_LOAD(option, value) load(#option, options.option);
  HALSIM_OPTIONS(HALSIM_LOAD)
#undef HALSIM_LOAD
}

bool countdown(std::atomic<long>& option) {
  long left = option.load();
  while (left > 0) {
    if (option.compare_exchange_weak(left, left - 1)) return left == 1;
  }
  return false;
}

// Both the ctypes layer and Paddle load this library; whoever comes first reads the environment.
namespace {
struct AtLoad {
  AtLoad() { load_options_from_environment(); }
} at_load;
}  // namespace

}  // namespace halsim
