/* The kernels of the opencl device. Offsets are bytes; each structure has its twin in structs.py. */

typedef struct { ulong base, stride; uint source, nbytes; } Field;  /* hal_core.memory.plan.SCATTER_MAP */
typedef struct { ulong dst, source; uint nbytes, pattern; } Write;  /* hal_core.memory.plan.WRITE */
typedef struct {
    ulong memory, nbytes, block, map, records, fields, slots, writes, record_bytes, slots_at, records_at, payload_at;
} Plan;

/* Carry out a packed plan: scatter the records over the fields, then copy or fill runs of bytes. One work group an
   item; the two parts never write the same byte. A spoilt descriptor writes nothing outside the plan's memory. */
__kernel void scatter(__global uchar *restrict memory, __global const uchar *restrict block,
                      __global const uchar *restrict map, const Plan plan)
{
    const ulong lane = get_local_id(0), lanes = get_local_size(0), item = get_group_id(0);
    const ulong spread = plan.records * plan.fields;
    memory += plan.memory;
    block += plan.block;
    if (item < spread) {
        const ulong record = item / plan.fields;
        __global const Field *field = (__global const Field *)(map + plan.map) + item % plan.fields;
        const ulong slot = ((__global const uint *)(block + plan.slots_at))[record];
        __global uchar *to = memory + field->base + slot * field->stride;
        __global const uchar *from = block + plan.records_at + record * plan.record_bytes + field->source;
        const ulong nbytes = slot < plan.slots ? field->nbytes : 0;
        for (ulong i = lane; i < nbytes; i += lanes)
            to[i] = from[i];
    } else if (item - spread < plan.writes) {
        __global const Write *write = (__global const Write *)block + (item - spread);
        __global uchar *to = memory + write->dst;
        const ulong nbytes = write->dst + write->nbytes <= plan.nbytes ? write->nbytes : 0;
        if (write->pattern == 0) {
            __global const uchar *from = block + plan.payload_at + write->source;
            for (ulong i = lane; i < nbytes; i += lanes)
                to[i] = from[i];
        } else {
            const ulong pattern = write->source;
            for (ulong i = lane; i < nbytes; i += lanes)
                to[i] = (uchar)(pattern >> (8 * (i % 8)));
        }
    }
}

/* Copy the runs of a strided view, row-major, to bytes that lie together (inward 0), or back. One work item a run. */
typedef struct { ulong view, packed, run, inward, axes, shape[8]; long strides[8]; } Strided;

__kernel void strided(__global uchar *restrict memory, __global uchar *restrict together, const Strided s)
{
    const ulong item = get_global_id(0);
    ulong rest = item;
    __global uchar *at = memory + s.view;
    __global uchar *packed = together + s.packed + item * s.run;
    for (ulong axis = s.axes; axis-- > 0; rest /= s.shape[axis])
        at += (long)(rest % s.shape[axis]) * s.strides[axis];
    for (ulong i = 0; i < s.run; i++)
        if (s.inward)
            at[i] = packed[i];
        else
            packed[i] = at[i];
}

/* A step's update, one work item a slot: what hal_core.devices.update_inputs does. Fields as in STEP_FIELDS. */
enum { SAMPLED, ACCEPT_TOKENS, PROMPT_LENS, MIN_DEC, MAX_DEC, EOS_NUM, EOS_IDS, STOPS_NUM, STOPS_LEN, STOPS, ROLE,
       ACCEPT_NUM, STEP_IDX, STOP_FLAGS, STOP_REASON, DECODER, ENCODER, THIS_TIME, NEXT, DRAFT_NUM, TOKEN_IDS, FIELDS };
enum { STOP = 1, LENGTH = 2, ERROR = 4, ROLE_PREFILL = 1 };
typedef struct { ulong at[FIELDS], stride[FIELDS]; long max_accept, max_stop_length, max_model_len, speculative; } Step;
#define ROW(type, field) ((__global type *)(memory + step.at[field] + slot * step.stride[field]))

bool ends_with_stop(__global const long *stops, __global const int *lengths, int count, long longest,
                    __global const long *tokens, long total, long generated)
{
    for (int i = 0; i < count; i++) {
        const long length = lengths[i];
        if (length <= 0 || length > generated)
            continue;
        long same = 0;
        while (same < length && tokens[total - length + same] == stops[i * longest + same])
            same++;
        if (same == length)
            return true;
    }
    return false;
}

__kernel void update(__global uchar *memory, const Step step)
{
    const ulong slot = get_global_id(0);
    const bool runs = !*ROW(uchar, STOP_FLAGS) && *ROW(int, THIS_TIME) > 0;
    const int encoder = runs ? *ROW(int, ENCODER) : 0;
    const long known = *ROW(long, PROMPT_LENS) + *ROW(long, STEP_IDX);
    const int prefilled = *ROW(int, DECODER) + encoder;
    bool gives = runs && (encoder == 0 || prefilled >= known);
    const int accepted = gives ? (step.speculative ? *ROW(int, ACCEPT_NUM) : 1) : 0;
    bool stopped = false;

    *ROW(int, ACCEPT_NUM) = accepted;
    if (accepted < 0 || accepted > step.max_accept) {
        gives = false;
        *ROW(uchar, STOP_FLAGS) = 1;
        *ROW(int, STOP_REASON) = ERROR;
    }
    if (encoder > 0)
        *ROW(int, DECODER) = prefilled;
    if (gives) {
        __global const long *given = step.speculative ? ROW(long, ACCEPT_TOKENS) : ROW(long, SAMPLED);
        __global long *tokens = ROW(long, TOKEN_IDS);
        long generated = *ROW(long, STEP_IDX);
        int count = 0, reason = 0;
        while (count < accepted && !stopped) {
            const long token = given[count], total = known + ++count;
            bool ends = false;
            tokens[total - 1] = token;
            generated++;
            for (int i = 0; i < *ROW(int, EOS_NUM); i++)
                ends |= ROW(long, EOS_IDS)[i] == token;
            ends = ends || ends_with_stop(ROW(long, STOPS), ROW(int, STOPS_LEN), *ROW(int, STOPS_NUM),
                                          step.max_stop_length, tokens, total, generated);
            if (ends && generated >= *ROW(long, MIN_DEC))
                reason = STOP;
            else if (generated >= *ROW(long, MAX_DEC) || total >= step.max_model_len)
                reason = LENGTH;
            stopped = reason || *ROW(int, ROLE) == ROLE_PREFILL;
        }
        *ROW(int, ACCEPT_NUM) = count;
        if (encoder == 0)
            *ROW(int, DECODER) += count;
        if (count) {
            *ROW(long, NEXT) = given[count - 1];
            *ROW(long, STEP_IDX) = generated;
        }
        if (reason || !step.speculative)
            *ROW(int, STOP_REASON) = reason;
        if (stopped)
            *ROW(uchar, STOP_FLAGS) = 1;
    }
    if (runs) {
        *ROW(int, THIS_TIME) = gives && !stopped;
        *ROW(int, ENCODER) = 0;
        *ROW(int, DRAFT_NUM) = 0;
    }
}
