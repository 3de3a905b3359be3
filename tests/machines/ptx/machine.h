// A GPU on a CPU: it executes the PTX of a kernel, a warp at a time, its lanes together, and checks every access.
//
// Written from the PTX ISA (docs.nvidia.com/cuda/parallel-thread-execution). Registers have 64 bits each, of which an
// instruction takes as many as its type has.
#pragma once
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace machine {

using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr int LANES = 32, MOST_OPERANDS = 14;

// The kernel does what a GPU does not promise, or what this machine does not know.
struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Warp;
struct Instruction;
using Handler = void (*)(Warp&, const Instruction&, u32 lanes);

// What decides where a warp goes on; the others go on with the next instruction. From TOGETHER on, lanes wait for others of
// their warp that are on their way.
enum Kind { PLAIN, BRANCH, RETURN, TOGETHER, BLOCK_BARRIER, CLUSTER_ARRIVE, CLUSTER_WAIT };

struct Instruction {
    std::string name;
    Handler run;
    Kind kind;
    int predicate;  // a register; -1: none
    bool negated;
    int count;
    i64 operands[MOST_OPERANDS];  // registers, but for offsets, targets and the like
    // What was executed: by warps, by lanes; and sectors of global memory, or passes over shared memory.
    mutable u64 warps, lanes, units;
};

// What a register holds when a thread begins.
enum Preset { CONSTANT, THREAD, THREADS, BLOCK, BLOCKS, LANE, WARP, RANK_IN_CLUSTER, BLOCKS_OF_CLUSTER };

struct Shape {
    int grid, threads, cluster, shared;
    bool early;      // may begin before the kernel before has ended
    bool backwards;  // warps and blocks in the opposite order
};

struct Kernel {
    std::string name;
    int registers, shared, parameters, most_threads;
    bool waits;  // has griddepcontrol.wait
    std::vector<Instruction> code;
    struct Constant {
        int at;
        Preset preset;
        u64 value;
    };
    std::vector<Constant> constants;
    int shared_of_launch_allowed = 0;
    Shape last{};
};

// An access to global memory.
struct Access {
    u64 address;
    i32 bytes, writes;
};

// Addresses that no process has begin here.
constexpr u64 NOWHERE = (u64)1 << 48;

// Where an access to memory stands: by whom, and how many barriers that thread had passed.
struct Stamp {
    u32 serial = 0;  // of the launch, or of the run of a cluster: others are over
    i32 thread = 0, block_barriers = 0, warp_barriers = 0, arrivals = 0;
};

// The last accesses to two bytes, or to one: a GPU orders accesses of two threads by barriers between them only.
struct Record {
    Stamp written, read, read_by_another;
    bool read_by_blocks = false;  // of which no barrier is common
};

// A copy from global to shared memory that a thread has begun and not waited for.
struct Copy {
    int lane, bytes;
    u64 to, from;
    bool zeros;  // in place of what is there
};

struct Cluster;

struct Block {
    int number, rank;
    int place;  // among the blocks that run
    Cluster* cluster;
    std::vector<char> memory;
    std::vector<Record> records;  // of each byte; those at even addresses stand for the next one too, unless by_bytes
    bool by_bytes = false;        // whether single bytes were accessed
    int warps_alive, arrived = 0, barriers = 0;
};

struct Warp {
    Block* block;
    int number;  // in its block
    std::vector<u64> registers;
    u32 alive, held;  // held: lanes that wait for others
    bool apart;       // lanes are at different instructions
    int at, lane_at[LANES];
    enum { RUNS, AT_BLOCK_BARRIER, AT_CLUSTER_BARRIER, ENDED } state;
    int barriers, arrivals, waits;
    bool waited_for_kernels_before;
    std::vector<Copy> copies;
    std::vector<size_t> groups;  // of copies: where each ends

    u64* operator[](i64 number) { return &registers[number * LANES]; }
    u32 mask_of(i64 number) {
        u32 mask = 0;
        for (int l = 0; l < LANES; l++) mask |= (u32)((*this)[number][l] & 1) << l;
        return mask;
    }
    int thread(int lane) const;  // among those of all blocks that run
};

struct Cluster {
    const Kernel* kernel;
    const Shape* shape;
    const char* parameters;
    std::vector<Block> blocks;
    std::vector<Warp> warps;
    int arrived = 0, barriers = 0;
    u32 serial;
};

// instructions.cpp: how each instruction is executed, by its name; memory.cpp: those that access memory.
const std::map<std::string, std::pair<Handler, Kind>>& handlers();
void add_memory(std::map<std::string, std::pair<Handler, Kind>>& to);
void forget_pages();  // before a launch: races are those of one launch

// machine.cpp
[[noreturn]] void fail(const Warp& w, const Instruction& i, const std::string& what);
void launch(const Kernel& kernel, const Shape& shape, const void* parameters);
extern bool counting;      // sectors and passes, which takes time
extern u32 launch_serial;  // of the launch that runs
extern i64 only;           // the block that launches run, with its cluster; -1: all blocks

// Of launches of one block: all blocks, its number and its accesses. Those to addresses that no process has go nowhere: zeros are read
// there.
struct Noted {
    int blocks, block;
    std::vector<Access> accesses;
};
extern std::vector<Noted> noted;

template <class F> inline void each(u32 lanes, F f) {
    if (lanes == ~0u) {
        for (int l = 0; l < LANES; l++) f(l);
    } else {
        for (int l = 0; l < LANES; l++)
            if (lanes >> l & 1) f(l);
    }
}

}  // namespace machine
