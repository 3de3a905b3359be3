// The functions of NVIDIA's driver that launch, or that say which GPU is the current one; and how kernels come into the
// machine. The launching code is given the address of `launch_kernel_ex` for that of cuLaunchKernelEx.
#include <cstdio>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "machine.h"

using machine::Kernel;

namespace {

// As cuda.h has them.
struct Attribute {
    int id;
    char pad[4];
    unsigned value[16];
};
struct Config {
    unsigned grid[3], block[3], shared_bytes;
    void* stream;
    const Attribute* attributes;
    unsigned attribute_count;
};
enum { CLUSTER_DIMENSION = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, LAUNCH_FAILED = 719 };

// DLPack's exchange API: its version, four functions, and the two that are changed.
struct ExchangeApi {
    unsigned version[2];
    void* other[4];
    int (*tensor_from)(void*, void*);
    int (*current_stream)(int, int, void**);
};
ExchangeApi of_torch, of_gpu;

// A context of one of two GPUs. Each thread has a stack of them, whose last is the current one.
struct Context {
    int device;
};
Context primary[2] = {{0}, {1}};
thread_local std::vector<Context*> contexts;
std::unordered_map<const void*, int> device_of_function;
std::mutex one_at_a_time;
std::string fault;

}  // namespace

extern "C" {

// For the tests: launches that were refused, contexts that were pushed, and the GPU that tensors are on.
int refused = 0, pushed = 0, tensors_on = 0;

int ctx_get_current(Context** context) {
    *context = contexts.empty() ? nullptr : contexts.back();
    return SUCCESS;
}

int ctx_set_current(Context* context) {
    if (!contexts.empty()) contexts.pop_back();
    if (context != nullptr) contexts.push_back(context);
    return SUCCESS;
}

int ctx_get_device(int* device) {
    if (contexts.empty()) return INVALID_CONTEXT;
    *device = contexts.back()->device;
    return SUCCESS;
}

int ctx_push_current(Context* context) {
    pushed++;
    contexts.push_back(context);
    return SUCCESS;
}

int ctx_pop_current(Context** context) {
    if (contexts.empty()) return INVALID_CONTEXT;
    *context = contexts.back();
    contexts.pop_back();
    return SUCCESS;
}

int device_primary_ctx_retain(Context** context, int device) {
    *context = &primary[device];
    return SUCCESS;
}

// Another context of a GPU than its primary one, as that of a part of its processors is.
Context* another_context(int device) { return new Context{device}; }

// A kernel without instructions; `add_...` then gives it what it has.
Kernel* new_kernel(const char* name, int registers, int shared, int parameters, int most_threads, int waits) {
    Kernel* kernel = new Kernel{name, registers, shared, parameters, most_threads, waits != 0, {}, {}};
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    device_of_function[kernel] = contexts.empty() ? 0 : contexts.back()->device;
    return kernel;
}

void add_constant(Kernel* kernel, int at, int preset, unsigned long long value) {
    kernel->constants.push_back({at, (machine::Preset)preset, value});
}

// Each instruction is, in turn: the number of its name, a predicate or -1, whether that is negated, how many operands, and
// these. Returns -1; or the number of a name that the machine does not know, or not with so many operands.
long long add_instructions(Kernel* kernel, const char* const* names, const long long* code, long long length) {
    const long long* const end = code + length;
    while (code < end) {
        const int count = (int)code[3];
        const auto found = machine::handlers().find(names[code[0]]);
        if (found == machine::handlers().end() || count > machine::MOST_OPERANDS) return code[0];
        machine::Instruction i{found->first, found->second.first, found->second.second, (int)code[1], code[2] != 0, count,
                               {},           0,                   0,                    0};
        memcpy(i.operands, code + 4, count * sizeof *code);
        kernel->code.push_back(i);
        code += 4 + count;
    }
    return -1;
}

void allow_shared(Kernel* kernel, int bytes) { kernel->shared_of_launch_allowed = bytes; }

// What was executed of an instruction: by warps, by lanes, and sectors or passes. Returns its name, or NULL after the last.
const char* executed(const Kernel* kernel, int instruction, unsigned long long* counts) {
    if (instruction >= (int)kernel->code.size()) return nullptr;
    const machine::Instruction& i = kernel->code[instruction];
    counts[0] = i.warps, counts[1] = i.lanes, counts[2] = i.units;
    i.warps = i.lanes = i.units = 0;
    return i.name.c_str();
}

// The shape of a kernel's last launch: blocks, threads of a block, bytes of shared memory that it has.
void last_launch(const Kernel* kernel, int* shape) {
    shape[0] = kernel->last.grid, shape[1] = kernel->last.threads;
    shape[2] = kernel->shared + kernel->last.shared;
}

void count_sectors(int yes) { machine::counting = yes; }

// From now on launches run this block alone, or the last one if there are fewer, and its cluster; -1: all blocks.
void run_only(long long block) {
    machine::only = block;
    machine::noted.clear();
}

// Of a launch since then: its blocks, the one that ran, and its accesses. Returns how many, or -1 if there is none.
long long noted(int launch, int* blocks, int* block, const machine::Access** accesses) {
    if (launch >= (int)machine::noted.size()) return -1;
    const machine::Noted& found = machine::noted[launch];
    *blocks = found.blocks;
    *block = found.block;
    *accesses = found.accesses.data();
    return (long long)found.accesses.size();
}

// What the last launch that failed did wrong.
const char* last_fault() { return fault.c_str(); }

int launch_kernel_ex(const Config* config, Kernel* kernel, void** arguments, void**) {
    static int launches = 0;
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    if (contexts.empty() || device_of_function.at(kernel) != contexts.back()->device) {
        refused++;
        return contexts.empty() ? INVALID_CONTEXT : INVALID_HANDLE;
    }
    machine::Shape shape{(int)config->grid[0], (int)config->block[0], 1, (int)config->shared_bytes, false,
                         launches++ % 2 == 1};
    for (unsigned i = 0; i < config->attribute_count; i++) {
        const Attribute& a = config->attributes[i];
        if (a.id == CLUSTER_DIMENSION) shape.cluster = (int)a.value[0];
        else if (a.id == PROGRAMMATIC_STREAM_SERIALIZATION) shape.early = a.value[0];
        else return INVALID_VALUE;
    }
    if (config->grid[0] == 0 || config->grid[1] != 1 || config->grid[2] != 1) return INVALID_VALUE;
    if (config->block[1] != 1 || config->block[2] != 1) return INVALID_VALUE;
    kernel->last = shape;
    try {
        machine::launch(*kernel, shape, arguments[0]);
        return SUCCESS;
    } catch (const machine::Fault& found) {
        fault = found.what();
        fprintf(stderr, "executed PTX: %s\n", found.what());
        return LAUNCH_FAILED;
    }
}

// The exchange API that says of the CPU's tensors that they are on a GPU.
void* exchange_api_of_gpu(const void* api) {
    memcpy(&of_torch, api, sizeof of_torch);
    of_gpu = of_torch;
    of_gpu.tensor_from = [](void* object, void* tensor) {
        const int failed = of_torch.tensor_from(object, tensor);
        int* device = static_cast<int*>(tensor) + 2;  // DLDevice: its type, and its number
        if (!failed && device[0] == 1) device[0] = 2, device[1] = tensors_on;
        return failed;
    };
    of_gpu.current_stream = [](int, int, void** stream) {
        *stream = nullptr;
        return 0;
    };
    return &of_gpu;
}

}  // extern "C"
