// A GPU's threads on a CPU: blocks, clusters, warps, barriers, exchanges between lanes, and shared memory that notices
// races. Every thread has a stack of its own; one runs at a time, until it waits for others.
#pragma once

namespace emulation {

struct Index {
    unsigned x;
};

struct Barrier {
    int arrived = 0;
    long long generation = 0;
};

struct Block;

struct Warp {
    Barrier exchange;
    unsigned long long values[2][32];
};

struct Thread {
    Index thread_index;
    Block* block;
    Warp* warp;
    long long cluster_epoch;
    bool arrived;
    const long long* waits_for;
    long long seen;
    bool ended;
    void* stack_pointer;
    char* stack;
};

struct Block {
    Index index;
    int rank;
    Barrier barrier;
    struct Memory {
        const void* declared;
        char* bytes;
        unsigned long size;
    } memories[8];
    int count;
    void* shared_of_launch;
};

extern Thread* now;

[[noreturn]] void fail(const char* what);
unsigned long long exchange(unsigned long long bits, int lane);
void block_barrier();
void cluster_arrive();
void cluster_wait();
void* shared_memory(const void* declared, unsigned long size);
void* same_in_block(void* here, int rank);

// When somebody accessed something: accesses of two threads are in order if a barrier of both lies between.
struct Access {
    const Thread* thread = nullptr;
    const Block* block = nullptr;
    long long cluster_epoch = 0, block_epoch = 0;

    void check() const {
        if (thread == nullptr || thread == now) return;
        bool ordered = cluster_epoch != now->cluster_epoch;
        if (block == now->block) ordered |= block_epoch != now->block->barrier.generation;
        if (!ordered) fail("two threads access the same shared memory with no barrier between");
    }
    void note() {
        thread = now;
        block = now->block;
        cluster_epoch = now->cluster_epoch;
        block_epoch = block->barrier.generation;
    }
};

// A value in shared memory. Of its readers the first since it was written is known, and whether there was another.
template <class T> struct Cell {
    T value;
    Access written, read, read_by_another;

    operator T() {
        written.check();
        if (written.thread == nullptr) fail("shared memory is read that nobody wrote");
        if (read.thread == nullptr || read.thread == now) read.note();
        else read_by_another.note();
        return value;
    }
    Cell& operator=(T to) {
        written.check();
        read.check();
        read_by_another.check();
        read = read_by_another = Access();
        written.note();
        value = to;
        return *this;
    }
    Cell& operator=(Cell&) = delete;
    Cell& operator+=(T more) { return *this = (T)(T(*this) + more); }
};

template <class T, int COUNT> Cell<T> (*shared(const void* declared))[COUNT] {
    return static_cast<Cell<T>(*)[COUNT]>(shared_memory(declared, sizeof(Cell<T>) * COUNT));
}

}  // namespace emulation
