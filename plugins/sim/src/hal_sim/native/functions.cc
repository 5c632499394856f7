#include "functions.h"

#include <cstring>
#include <map>
#include <mutex>

static halsim::Kernel& kernel_of(halsim_kernel* kernel) { return *reinterpret_cast<halsim::Kernel*>(kernel); }

const void* halsim_kernel_read(halsim_kernel* kernel, uint64_t address, size_t bytes) {
  return kernel_of(kernel).read("operand", address, bytes);
}

void* halsim_kernel_write(halsim_kernel* kernel, uint64_t address, size_t bytes) {
  return kernel_of(kernel).write("operand", address, bytes);
}

void halsim_kernel_fail(halsim_kernel* kernel, const char* text) { kernel_of(kernel).fail(0, 0, text); }

namespace halsim {

// Functions of other files register from their static initialisers, so this must exist before any of them runs.
static std::map<std::string, halsim_function>& table() {
  static auto& functions = *new std::map<std::string, halsim_function>;
  return functions;
}
static std::mutex& lock() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

void register_function(const char* name, halsim_function function) {
  std::lock_guard<std::mutex> guard(lock());
  table()[name] = function;
}

halsim_function find_function(const char* name) {
  std::lock_guard<std::mutex> guard(lock());
  auto it = table().find(name);
  return it == table().end() ? nullptr : it->second;
}

Status launch_function(Stream* stream, halsim_function function, const void* arguments, size_t bytes) {
  auto copy = std::make_shared<std::string>(static_cast<const char*>(arguments), bytes);
  return submit(stream, Kind::kernel_function, 0, 0, bytes, {}, [function, copy](const OperationRef& op) {
    Kernel kernel(op);
    function(reinterpret_cast<halsim_kernel*>(&kernel), copy->data(), copy->size());
  });
}

namespace {

// The smallest useful one, and the pattern to follow: adds a number to each of `count` 64-bit integers.
struct AddI64 {
  uint64_t address, count;
  int64_t value;
};

void add_i64(halsim_kernel* kernel, const void* arguments, size_t bytes) {
  AddI64 a;
  if (bytes != sizeof a) return halsim_kernel_fail(kernel, "add_i64 takes an address, a count and a value");
  std::memcpy(&a, arguments, sizeof a);
  const void* in = halsim_kernel_read(kernel, a.address, a.count * sizeof(int64_t));
  auto* out = static_cast<char*>(halsim_kernel_write(kernel, a.address, a.count * sizeof(int64_t)));
  if (!in || !out) return;
  for (uint64_t i = 0; i < a.count; ++i) {
    int64_t v;
    std::memcpy(&v, out + i * sizeof v, sizeof v);
    v += a.value;
    std::memcpy(out + i * sizeof v, &v, sizeof v);
  }
}

const RegisterFunction add_i64_registered("add_i64", add_i64);

}  // namespace
}  // namespace halsim
