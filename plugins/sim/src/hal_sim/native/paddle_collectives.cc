// xccl_*: Paddle's communication library, over the groups of group.h.
#include <cstdio>
#include <cstring>

#include "collectives.h"
#include "paddle_device.h"

namespace halsim {

namespace {

Group* group_of(C_CCLComm comm) { return reinterpret_cast<Group*>(comm); }
Stream* stream_of(C_Stream s) { return reinterpret_cast<Stream*>(s); }

// Between group_start and group_end the transfers of this thread are collected, then made together.
thread_local int nesting = 0;
thread_local std::vector<Transfer>* collected = nullptr;
thread_local Stream* collected_on = nullptr;

C_Status run(C_CCLComm comm, C_Stream s, const Collective& c) {
  return to_paddle(submit_collective(group_of(comm), stream_of(s), c));
}

C_Status unique_id_size(size_t* out) {
  *out = kNameBytes;
  return C_SUCCESS;
}
C_Status unique_id(C_CCLRootId* out) {
  std::snprintf(static_cast<char*>(out->data), kNameBytes, "%s", new_group_name().c_str());
  return C_SUCCESS;
}
C_Status comm_name(C_CCLComm comm, char* out) {
  std::strcpy(out, group_of(comm)->name.c_str());
  return C_SUCCESS;
}
C_Status comm_init(size_t ranks, C_CCLRootId* id, size_t rank, C_CCLComm* out) {
  if (id->sz < kNameBytes) return C_ERROR;
  Group* group = nullptr;
  const Status status = join_group(static_cast<const char*>(id->data), static_cast<uint32_t>(ranks),
                                   static_cast<uint32_t>(rank), &group);
  *out = reinterpret_cast<C_CCLComm>(group);
  return to_paddle(status);
}
C_Status comm_destroy(C_CCLComm comm) { return to_paddle(leave_group(group_of(comm))); }

C_Status broadcast(void* buffer, size_t count, C_DataType type, size_t root, C_CCLComm comm, C_Stream s) {
  return run(comm, s, {Kind::broadcast, buffer, buffer, count, static_cast<Type>(type), Reduce::sum,
                       static_cast<uint32_t>(root)});
}
C_Status all_reduce(void* in, void* out, size_t count, C_DataType type, C_CCLReduceOp how, C_CCLComm comm, C_Stream s) {
  return run(comm, s, {Kind::all_reduce, in, out, count, static_cast<Type>(type), static_cast<Reduce>(how)});
}
C_Status reduce(void* in, void* out, size_t count, C_DataType type, C_CCLReduceOp how, size_t root, C_CCLComm comm,
                C_Stream s) {
  return run(comm, s, {Kind::reduce, in, out, count, static_cast<Type>(type), static_cast<Reduce>(how),
                       static_cast<uint32_t>(root)});
}
C_Status all_gather(void* in, void* out, size_t count, C_DataType type, C_CCLComm comm, C_Stream s) {
  return run(comm, s, {Kind::all_gather, in, out, count, static_cast<Type>(type)});
}
C_Status reduce_scatter(void* in, void* out, size_t count, C_DataType type, C_CCLReduceOp how, C_CCLComm comm,
                        C_Stream s) {
  return run(comm, s, {Kind::reduce_scatter, in, out, count, static_cast<Type>(type), static_cast<Reduce>(how)});
}

C_Status transfer(void* buffer, size_t count, C_DataType type, size_t peer, C_CCLComm comm, C_Stream s, bool sending) {
  const Transfer t{group_of(comm), buffer, count * type_bytes(static_cast<Type>(type)), static_cast<uint32_t>(peer),
                   sending};
  if (!nesting) return to_paddle(submit_transfers(stream_of(s), {t}));
  if (!collected) collected = new std::vector<Transfer>;
  collected->push_back(t);
  collected_on = stream_of(s);
  return C_SUCCESS;
}
C_Status send(void* buffer, size_t count, C_DataType type, size_t to, C_CCLComm comm, C_Stream s) {
  return transfer(buffer, count, type, to, comm, s, true);
}
C_Status receive(void* buffer, size_t count, C_DataType type, size_t from, C_CCLComm comm, C_Stream s) {
  return transfer(buffer, count, type, from, comm, s, false);
}
C_Status group_start() {
  ++nesting;
  return C_SUCCESS;
}
C_Status group_end() {
  if (!nesting || --nesting || !collected) return C_SUCCESS;
  std::vector<Transfer> transfers;
  transfers.swap(*collected);
  return to_paddle(submit_transfers(collected_on, std::move(transfers)));
}

}  // namespace

void fill_collectives(C_DeviceInterface* d) {
  d->xccl_get_comm_name = comm_name;
  d->xccl_get_unique_id_size = unique_id_size;
  d->xccl_get_unique_id = unique_id;
  d->xccl_comm_init_rank = comm_init;
  d->xccl_destroy_comm = comm_destroy;
  d->xccl_broadcast = broadcast;
  d->xccl_all_reduce = all_reduce;
  d->xccl_reduce = reduce;
  d->xccl_all_gather = all_gather;
  d->xccl_reduce_scatter = reduce_scatter;
  d->xccl_send = send;
  d->xccl_recv = receive;
  d->xccl_group_start = group_start;
  d->xccl_group_end = group_end;
}

}  // namespace halsim
