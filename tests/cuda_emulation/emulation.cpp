#include "emulation.h"

#include <sanitizer/common_interface_defs.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#ifndef __x86_64__
#error "stacks are switched in x86-64 assembly"
#endif

// Puts the registers that a function must keep on this stack, and goes on where another stack left off.
extern "C" void switch_stacks(void** left, void* to);
asm(R"(
.text
.globl switch_stacks
.type switch_stacks, @function
switch_stacks:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

namespace emulation {

Thread* now = nullptr;

namespace {

constexpr int WARP = 32, STACK = 128 * 1024;

using Kernel = void (*)(const void*);

struct Launch {
    Kernel kernel;
    const void* arguments;
    int threads_of_block;
    std::vector<Block> blocks;  // of the cluster
    std::vector<Warp> warps;
    std::vector<Thread> threads;
    Barrier cluster;
    void* scheduler = nullptr;
    const void* scheduler_stack = nullptr;
    unsigned long scheduler_size = 0;
};

Launch* launch = nullptr;
std::vector<char*> stacks;

void leave(bool for_good) {
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fake, launch->scheduler_stack, launch->scheduler_size);
    switch_stacks(&now->stack_pointer, launch->scheduler);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
}

void wait_for(const long long& generation, long long seen) {
    now->waits_for = &generation;
    now->seen = seen;
    while (*now->waits_for == now->seen) leave(false);
    now->waits_for = nullptr;
}

void arrive(Barrier& barrier, int expected) {
    if (++barrier.arrived == expected) {
        barrier.arrived = 0;
        barrier.generation++;
    }
}

void begin() {
    __sanitizer_finish_switch_fiber(nullptr, &launch->scheduler_stack, &launch->scheduler_size);
    launch->kernel(launch->arguments);
    now->ended = true;
    leave(true);
    abort();
}

void resume(Thread& thread) {
    now = &thread;
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, thread.stack, STACK);
    switch_stacks(&launch->scheduler, thread.stack_pointer);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
}

void prepare(Thread& thread, int number) {
    while ((int)stacks.size() <= number) {
        void* memory = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) fail("no memory for the stacks of the threads");
        stacks.push_back(static_cast<char*>(memory));
    }
    thread.stack = stacks[number];
    void** top = reinterpret_cast<void**>(thread.stack + STACK);
    *--top = nullptr;  // where `begin` would return to; and its frame is aligned as after a call
    *--top = reinterpret_cast<void*>(begin);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    thread.stack_pointer = top;
}

}  // namespace

void fail(const char* what) {
    fprintf(stderr, "emulation: %s", what);
    if (now != nullptr) fprintf(stderr, " (block %u, thread %u)", now->block->index.x, now->thread_index.x);
    fprintf(stderr, "\n");
    abort();
}

unsigned long long exchange(unsigned long long bits, int lane) {
    Warp& warp = *now->warp;
    const long long generation = warp.exchange.generation;
    warp.values[generation % 2][now->thread_index.x % WARP] = bits;
    arrive(warp.exchange, WARP);
    wait_for(warp.exchange.generation, generation);
    return warp.values[generation % 2][lane];
}

void block_barrier() {
    Barrier& barrier = now->block->barrier;
    const long long generation = barrier.generation;
    arrive(barrier, launch->threads_of_block);
    wait_for(barrier.generation, generation);
}

void cluster_arrive() {
    if (now->arrived) fail("a thread arrives twice at the barrier of its cluster");
    now->arrived = true;
    now->cluster_epoch++;
    arrive(launch->cluster, (int)launch->threads.size());
}

void cluster_wait() {
    if (!now->arrived) fail("a thread waits at the barrier of its cluster without having arrived");
    now->arrived = false;
    // Every thread has been at as many barriers of the cluster as its epoch says.
    wait_for(launch->cluster.generation, now->cluster_epoch - 1);
}

void* shared_memory(const void* declared, unsigned long size) {
    Block& block = *now->block;
    for (int i = 0; i < block.count; i++) {
        if (block.memories[i].declared == declared) return block.memories[i].bytes;
    }
    if (block.count == 8) fail("more than 8 arrays in shared memory");
    char* bytes = static_cast<char*>(calloc(1, size));  // nobody has accessed it; its values are never read unwritten
    block.memories[block.count++] = {declared, bytes, size};
    return bytes;
}

void* same_in_block(void* here, int rank) {
    Block& own = *now->block;
    for (int i = 0; i < own.count; i++) {
        const long offset = static_cast<char*>(here) - own.memories[i].bytes;
        if (offset < 0 || offset >= (long)own.memories[i].size) continue;
        if (rank < 0 || rank >= (int)launch->blocks.size()) fail("there is no such block in the cluster");
        Thread* const self = now;
        Thread other = *now;
        other.block = &launch->blocks[rank];
        now = &other;
        char* bytes = static_cast<char*>(shared_memory(own.memories[i].declared, own.memories[i].size));
        now = self;
        return bytes + offset;
    }
    fail("an address that is not in shared memory");
}

}  // namespace emulation

using namespace emulation;

namespace {

// Runs a kernel as a GPU would; `backwards`: threads and blocks in the opposite order.
void emulate(Kernel kernel, const void* arguments, int grid, int threads_of_block, int cluster, unsigned shared,
             bool backwards) {
    if (threads_of_block % WARP != 0 || threads_of_block > 1024) fail("a block of that many threads");
    if (grid % cluster != 0) fail("the grid is no multiple of the cluster");
    for (int n = 0; n < grid / cluster; n++) {
        const int first = (backwards ? grid / cluster - 1 - n : n) * cluster;
        Launch here;
        here.kernel = kernel;
        here.arguments = arguments;
        here.threads_of_block = threads_of_block;
        here.blocks.resize(cluster);
        here.threads.resize(cluster * threads_of_block);
        here.warps.resize(here.threads.size() / WARP);
        launch = &here;
        for (int b = 0; b < cluster; b++) here.blocks[b] = {{(unsigned)(first + b)}, b, {}, {}, 0, calloc(1, shared)};
        for (int t = 0; t < (int)here.threads.size(); t++) {
            here.threads[t] = {};
            here.threads[t].thread_index.x = t % threads_of_block;
            here.threads[t].block = &here.blocks[t / threads_of_block];
            here.threads[t].warp = &here.warps[t / WARP];
            prepare(here.threads[t], t);
        }
        for (size_t ended = 0; ended < here.threads.size();) {
            bool progress = false;
            for (size_t i = 0; i < here.threads.size(); i++) {
                Thread& thread = here.threads[backwards ? here.threads.size() - 1 - i : i];
                if (thread.ended || (thread.waits_for != nullptr && *thread.waits_for == thread.seen)) continue;
                resume(thread);
                progress = true;
                ended += thread.ended;
            }
            if (!progress) fail("threads wait for others that have ended, or that wait elsewhere");
        }
        now = nullptr;
        for (Block& block : here.blocks) {
            for (int i = 0; i < block.count; i++) free(block.memories[i].bytes);
            free(block.shared_of_launch);
        }
    }
    launch = nullptr;
}

// As cuda.h has them.
struct Attribute {
    int id;
    char pad[4];
    unsigned cluster[16];
};
struct Config {
    unsigned grid[3], block[3], shared_bytes;
    void* stream;
    const Attribute* attributes;
    unsigned attribute_count;
};

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
std::map<const void*, int> device_of_function;
std::mutex one_at_a_time;

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_HANDLE = 400 };

}  // namespace

// For the tests: launches that were refused, contexts that were pushed, and the GPU that tensors are on.
extern "C" int refused = 0, pushed = 0, tensors_on = 0;

extern "C" int ctx_get_current(Context** context) {
    *context = contexts.empty() ? nullptr : contexts.back();
    return SUCCESS;
}

extern "C" int ctx_set_current(Context* context) {
    if (!contexts.empty()) contexts.pop_back();
    if (context != nullptr) contexts.push_back(context);
    return SUCCESS;
}

extern "C" int ctx_get_device(int* device) {
    if (contexts.empty()) return INVALID_CONTEXT;
    *device = contexts.back()->device;
    return SUCCESS;
}

extern "C" int ctx_push_current(Context* context) {
    pushed++;
    contexts.push_back(context);
    return SUCCESS;
}

extern "C" int ctx_pop_current(Context** context) {
    if (contexts.empty()) return INVALID_CONTEXT;
    *context = contexts.back();
    contexts.pop_back();
    return SUCCESS;
}

extern "C" int device_primary_ctx_retain(Context** context, int device) {
    *context = &primary[device];
    return SUCCESS;
}

// Another context of a GPU than its primary one, as that of a part of its processors is.
extern "C" Context* another_context(int device) { return new Context{device}; }

extern "C" void module_loaded(const void* function) {
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    device_of_function[function] = contexts.back()->device;
}

extern "C" int launch_kernel_ex(const Config* config, Kernel kernel, void** arguments, void**) {
    static int launches = 0;
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    if (contexts.empty() || device_of_function.at((const void*)kernel) != contexts.back()->device) {
        refused++;
        return contexts.empty() ? INVALID_CONTEXT : INVALID_HANDLE;
    }
    int cluster = 1;
    for (unsigned i = 0; i < config->attribute_count; i++) {
        if (config->attributes[i].id == 4) cluster = (int)config->attributes[i].cluster[0];
    }
    if (config->grid[0] == 0 || config->grid[1] != 1 || config->grid[2] != 1) return INVALID_VALUE;
    if (config->block[1] != 1 || config->block[2] != 1) return INVALID_VALUE;
    emulate(kernel, arguments[0], (int)config->grid[0], (int)config->block[0], cluster, config->shared_bytes,
            launches++ % 2);
    return SUCCESS;
}

// The exchange API that says of the CPU's tensors that they are on a GPU.
extern "C" void* exchange_api_of_gpu(const void* api) {
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
