// The few Paddle operators that would otherwise fail or fall back to the CPU, as asynchronous kernels on the stream.
//
// Registered through Paddle's C interface at load, because the device type's name is known only then. Everything moves
// bytes, so one function serves all data types. Each kernel has two entries: Paddle's dynamic mode calls the second
// with the operator's own arguments (references arrive as pointers), everything else the first.
#include <vector>

#include "collectives.h"
#include "half.h"
#include "kernels.h"
#include "paddle_device.h"
#include "paddle/phi/capi/include/c_device_context.h"
#include "paddle/phi/capi/include/c_int_array.h"
#include "paddle/phi/capi/include/c_kernel_context.h"
#include "paddle/phi/capi/include/c_kernel_factory.h"
#include "paddle/phi/capi/include/c_kernel_registry.h"
#include "paddle/phi/capi/include/c_scalar.h"
#include "paddle/phi/capi/include/c_tensor.h"

namespace halsim {

namespace {

using Dims = std::vector<int64_t>;

Dims dims_of(PD_Tensor* t) {
  PD_Status status;
  Dims dims(static_cast<size_t>(PD_TensorGetNumDims(t, &status)));
  for (size_t i = 0; i < dims.size(); ++i) dims[i] = PD_TensorGetDim(t, i, &status);
  return dims;
}

Dims strides_of(PD_Tensor* t) {
  PD_Status status;
  Dims strides(static_cast<size_t>(PD_TensorGetNumStrides(t, &status)));
  for (size_t i = 0; i < strides.size(); ++i) strides[i] = PD_TensorGetStride(t, i, &status);
  return strides;
}

Dims dense(const Dims& dims) {
  Dims strides(dims.size(), 1);
  for (size_t i = dims.size(); i-- > 1;) strides[i - 1] = strides[i] * dims[i];
  return strides;
}

uint64_t data_of(PD_Tensor* t) {
  PD_Status status;
  return reinterpret_cast<uint64_t>(PD_TensorGetDataPointer(t, &status));
}

int64_t count_of(PD_Tensor* t) {
  PD_Status status;
  return PD_TensorGetElementCount(t, &status);
}

Type type_of(PD_Tensor* t) {
  PD_Status status;
  return static_cast<Type>(PD_TensorGetPDDataType(t, &status));
}

Stream* stream_of(PD_DeviceContext* context) {
  PD_Status status;
  return reinterpret_cast<Stream*>(PD_DeviceContextGetStream(context, &status));
}

uint64_t allocate(PD_DeviceContext* context, PD_Tensor* t) {
  PD_Status status;
  return reinterpret_cast<uint64_t>(
      PD_DeviceContextAllocateTensor(context, t, 0, static_cast<PD_DataType>(type_of(t)), &status));
}

void set_shape(PD_Tensor* t, const Dims& dims, const Dims& strides) {
  PD_Status status;
  PD_TensorSetDims(t, static_cast<int64_t>(dims.size()), dims.data(), &status);
  PD_TensorSetStrides(t, static_cast<int64_t>(strides.size()), strides.data(), &status);
}

// A kernel cannot return an error to Paddle; the next wait for the device returns it.
void launched(PD_DeviceContext* context, Status status) {
  if (status == Status::ok) return;
  Stream* s = stream_of(context);
  set_device_error(check_stream(s) == Status::ok ? s->device : 0, status, last_error());
}

void copy_strided(PD_DeviceContext* context, Type type, const Dims& dims, uint64_t src, const Dims& from, uint64_t dst,
                  const Dims& to) {
  Strided s{};
  const auto item = static_cast<int64_t>(type_bytes(type));
  s.dst = dst;
  s.src = src;
  s.item_bytes = static_cast<uint32_t>(item);
  s.rank = static_cast<uint32_t>(dims.size());
  for (size_t i = 0; i < dims.size() && i < kMaxRank; ++i) {
    s.dims[i] = dims[i];
    s.src_strides[i] = from[i] * item;
    s.dst_strides[i] = to[i] * item;
  }
  launched(context, launch_strided(stream_of(context), s));
}

void contiguous(PD_DeviceContext* context, PD_Tensor* x, PD_Tensor* out) {
  const Dims dims = dims_of(x);
  set_shape(out, dims, dense(dims));
  const uint64_t dst = allocate(context, out);
  if (count_of(x)) copy_strided(context, type_of(x), dims, data_of(x), strides_of(x), dst, dense(dims));
}

void strided_copy(PD_DeviceContext* context, PD_Tensor* x, const Dims& dims, const Dims& strides, int64_t offset,
                  PD_Tensor* out) {
  PD_Status status;
  set_shape(out, dims, strides);
  PD_TensorSetOffset(out, offset, &status);
  if (count_of(x)) copy_strided(context, type_of(x), dims_of(x), data_of(x), strides_of(x), data_of(out), strides);
}

void fill_with(PD_DeviceContext* context, PD_Scalar* value, PD_Tensor* out) {
  const Type type = type_of(out);
  const uint64_t dst = allocate(context, out);
  const auto real = PD_ScalarGetFloat64Data(value);
  const auto narrow = static_cast<float>(real);
  uint64_t pattern = 0;
  switch (type) {
    case Type::b8: pattern = PD_ScalarGetBoolData(value); break;
    case Type::f64: std::memcpy(&pattern, &real, sizeof real); break;
    case Type::f32: std::memcpy(&pattern, &narrow, sizeof narrow); break;
    case Type::f16: pattern = narrow_f16(narrow); break;
    case Type::bf16: pattern = narrow_bf16(narrow); break;
    default: pattern = static_cast<uint64_t>(PD_ScalarGetInt64Data(value));
  }
  const size_t item = type_bytes(type), bytes = item * static_cast<size_t>(count_of(out));
  if (bytes) launched(context, launch_fill(stream_of(context), dst, bytes, pattern, static_cast<uint32_t>(item)));
}

void full(PD_DeviceContext* context, PD_IntArray* shape, PD_Scalar* value, PD_DataType, PD_Tensor* out) {
  const PD_List list = PD_IntArrayGetDataPointer(shape);
  const auto* first = static_cast<const int64_t*>(list.data);
  const Dims dims(first, first + list.size);
  set_shape(out, dims, dense(dims));
  fill_with(context, value, out);
}

void full_like(PD_DeviceContext* context, PD_Tensor*, PD_Scalar* value, PD_DataType, PD_Tensor* out) {
  fill_with(context, value, out);
}

void fill(PD_DeviceContext* context, PD_Tensor*, PD_Scalar* value, PD_Tensor* out) { fill_with(context, value, out); }

void scatter(PD_DeviceContext* context, PD_Tensor* x, PD_Tensor* index, PD_Tensor* updates, bool overwrite,
             PD_Tensor* out) {
  const Dims dims = dims_of(x);
  const uint64_t src = data_of(x), dst = allocate(context, out);
  const Type type = type_of(x);
  if (src != dst && count_of(x)) copy_strided(context, type, dims, src, dense(dims), dst, dense(dims));
  const auto count = static_cast<uint64_t>(count_of(index));
  if (!count || dims.empty() || !dims[0]) return;
  IndexRows rows{};
  rows.dst = dst;
  rows.index = data_of(index);
  rows.rows = data_of(updates);
  rows.dst_rows = static_cast<uint64_t>(dims[0]);
  rows.row_bytes = static_cast<uint64_t>(count_of(x)) / rows.dst_rows * type_bytes(type);
  rows.count = count;
  rows.index_bytes = static_cast<uint32_t>(type_bytes(type_of(index)));
  rows.add_type = overwrite ? 0 : static_cast<uint32_t>(type);
  launched(context, launch_index_rows(stream_of(context), rows));
}

// ---- the entries that unpack Paddle's kernel context -----------------------------------------------------------------
PD_DeviceContext* device_context(PD_KernelContext* c) { return PD_KernelContextGetDeviceContext(c); }
PD_Tensor* input(PD_KernelContext* c, size_t i) { return PD_KernelContextInputAt(c, i); }
PD_Tensor* output(PD_KernelContext* c) { return PD_KernelContextOutputAt(c, 0); }

Dims list_at(PD_KernelContext* c, size_t i) {
  const PD_List list = PD_KernelContextListInt64AttrAt(c, i);
  const auto* first = static_cast<const int64_t*>(list.data);
  return Dims(first, first + list.size);
}

void contiguous_entry(PD_KernelContext* c) { contiguous(device_context(c), input(c, 0), output(c)); }
void strided_copy_entry(PD_KernelContext* c) {
  strided_copy(device_context(c), input(c, 0), list_at(c, 0), list_at(c, 1), PD_KernelContextInt64AttrAt(c, 2), output(c));
}
void full_entry(PD_KernelContext* c) {
  full(device_context(c), PD_KernelContextIntArrayAttrAt(c, 0), PD_KernelContextScalarAttrAt(c, 1), UNDEFINED, output(c));
}
void full_like_entry(PD_KernelContext* c) {
  full_like(device_context(c), input(c, 0), PD_KernelContextScalarAttrAt(c, 0), UNDEFINED, output(c));
}
void fill_entry(PD_KernelContext* c) {
  fill(device_context(c), input(c, 0), PD_KernelContextScalarAttrAt(c, 0), output(c));
}
void scatter_entry(PD_KernelContext* c) {
  scatter(device_context(c), input(c, 0), input(c, 1), input(c, 2), PD_KernelContextBoolAttrAt(c, 0), output(c));
}

void no_argument_definitions(const PD_KernelKey*, PD_Kernel*) {}

using Types = std::vector<PD_KernelArgumentType>;
void add_kernel(const char* device, const char* name, size_t inputs, Types attributes,
                void (*entry)(PD_KernelContext*), void* direct) {
  Types in(inputs, PD_ARG_TYPE_TENSOR), out(1, PD_ARG_TYPE_TENSOR);
  for (C_DataType type : {BOOL, UINT8, INT8, INT16, INT32, INT64, FLOAT16, BFLOAT16, FLOAT32, FLOAT64}) {
    PD_RegisterPhiKernel(name, device, type, ALL_LAYOUT, in.size(), in.data(), attributes.size(), attributes.data(),
                         out.size(), out.data(), no_argument_definitions, entry, direct);
  }
}

template <typename Function>
void* pointer(Function* f) {
  return reinterpret_cast<void*>(f);
}

}  // namespace

void register_paddle_kernels(const char* device) {
  add_kernel(device, "contiguous", 1, {}, contiguous_entry, pointer(contiguous));
  add_kernel(device, "assign", 1, {}, contiguous_entry, pointer(contiguous));
  add_kernel(device, "strided_copy", 1, {PD_ARG_TYPE_LIST_INT64, PD_ARG_TYPE_LIST_INT64, PD_ARG_TYPE_INT64},
             strided_copy_entry, pointer(strided_copy));
  add_kernel(device, "full", 0, {PD_ARG_TYPE_INT_ARRAY, PD_ARG_TYPE_SCALAR, PD_ARG_TYPE_DATA_TYPE}, full_entry,
             pointer(full));
  add_kernel(device, "full_like", 1, {PD_ARG_TYPE_SCALAR, PD_ARG_TYPE_DATA_TYPE}, full_like_entry, pointer(full_like));
  add_kernel(device, "fill", 1, {PD_ARG_TYPE_SCALAR}, fill_entry, pointer(fill));
  add_kernel(device, "scatter", 3, {PD_ARG_TYPE_BOOL}, scatter_entry, pointer(scatter));
}

}  // namespace halsim
