// Runs a kernel: clusters one after the other, of each the warps by turns, each until it waits for others.
#include "machine.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>

namespace machine {

bool counting = false;
u32 launch_serial = 0;
i64 only = -1;
std::vector<Noted> noted;

namespace {

u32 cluster_serial = 0;

void go(Warp& w, u32 lanes, int to) {
    if (lanes == w.alive && !w.apart) {
        w.at = to;
        return;
    }
    if (!w.apart) std::fill(w.lane_at, w.lane_at + LANES, w.at);
    w.apart = true;
    for (int l = 0; l < LANES; l++)
        if (lanes >> l & 1) w.lane_at[l] = to;
}

// The lanes that go on: all, or those that are furthest behind, so that they meet the others again. Lanes that are held
// go on when no others are left.
u32 together(Warp& w) {
    if (!w.apart) return w.alive;
    if (!(w.alive & ~w.held)) w.held = 0;
    const u32 free = w.alive & ~w.held;
    int least = INT32_MAX;
    u32 lanes = 0;
    for (int l = 0; l < LANES; l++)
        if (free >> l & 1) least = std::min(least, w.lane_at[l]);
    for (int l = 0; l < LANES; l++) lanes |= (u32)(w.alive >> l & 1 && w.lane_at[l] == least) << l;
    w.at = least;
    w.apart = lanes != w.alive;
    return lanes;
}

void arrive_at_block_barrier(Warp& w) {
    Block& block = *w.block;
    w.state = Warp::AT_BLOCK_BARRIER;
    if (++block.arrived < (int)(w.block->cluster->shape->threads / LANES)) return;
    block.arrived = 0;
    block.barriers++;
    for (Warp& other : block.cluster->warps)
        if (other.block == &block) other.state = Warp::RUNS;
}

void arrive_at_cluster_barrier(Warp& w, const Instruction& i) {
    Cluster& cluster = *w.block->cluster;
    if (w.arrivals != w.waits) fail(w, i, "a warp arrives twice at the barrier of its cluster");
    w.arrivals++;
    if (++cluster.arrived < (int)cluster.warps.size()) return;
    cluster.arrived = 0;
    cluster.barriers++;
}

void run(Warp& w) {
    const Kernel& kernel = *w.block->cluster->kernel;
    while (w.state == Warp::RUNS) {
        const bool last = !(w.alive & ~w.held);
        const u32 group = together(w);
        const Instruction& i = kernel.code[w.at];
        if (i.kind >= TOGETHER && w.apart && !last) {
            w.held |= group;
            continue;
        }
        w.held &= ~group;
        u32 lanes = group;
        if (i.predicate >= 0) lanes &= i.negated ? ~w.mask_of(i.predicate) : w.mask_of(i.predicate);
        i.warps++;
        i.lanes += (u64)__builtin_popcount(lanes);
        const int next = w.at + 1;
        switch (i.kind) {
            case PLAIN:
            case TOGETHER:
                if (lanes) i.run(w, i, lanes);
                go(w, group, next);
                continue;
            case BRANCH:
                if (lanes) go(w, lanes, (int)i.operands[0]);
                if (group != lanes) go(w, group & ~lanes, next);
                continue;
            case RETURN:
                if (group != lanes) go(w, group & ~lanes, next);
                w.alive &= ~lanes;
                if (w.alive) continue;
                w.state = Warp::ENDED;
                w.block->warps_alive--;
                continue;
            default: break;
        }
        if (lanes == 0 && !w.apart) {
            go(w, group, next);
            continue;
        }
        if (lanes != ~0u) fail(w, i, "a part of a warp is at a barrier");
        go(w, group, next);
        if (i.kind == BLOCK_BARRIER) arrive_at_block_barrier(w);
        if (i.kind == CLUSTER_ARRIVE) arrive_at_cluster_barrier(w, i);
        if (i.kind == CLUSTER_WAIT) {
            if (w.arrivals == w.waits) fail(w, i, "a warp waits at the barrier of its cluster and has not arrived");
            if (w.block->cluster->barriers >= w.arrivals) w.waits = w.arrivals;
            else w.state = Warp::AT_CLUSTER_BARRIER;
        }
    }
}

void begin(Warp& w, const Kernel& kernel, const Shape& shape) {
    w.alive = ~0u;
    w.held = 0;
    w.apart = false;
    w.at = 0;
    w.state = Warp::RUNS;
    w.barriers = w.arrivals = w.waits = 0;
    w.waited_for_kernels_before = !shape.early;
    w.copies.clear();
    w.groups.clear();
    for (const Kernel::Constant& c : kernel.constants) {
        for (int l = 0; l < LANES; l++) {
            const u64 values[] = {c.value,
                                  (u64)(w.number * LANES + l),
                                  (u64)shape.threads,
                                  (u64)w.block->number,
                                  (u64)shape.grid,
                                  (u64)l,
                                  (u64)w.number,
                                  (u64)w.block->rank,
                                  (u64)shape.cluster};
            w[c.at][l] = values[c.preset];
        }
    }
}

void check(const Kernel& kernel, const Shape& shape) {
    auto fail = [&](const std::string& what) { throw Fault(kernel.name + ": " + what); };
    if (shape.threads % LANES || shape.threads > 1024 || shape.threads == 0) fail("a block of that many threads");
    if (kernel.most_threads && shape.threads > kernel.most_threads) fail("more threads than it was compiled for");
    if (shape.grid % shape.cluster) fail("the grid is no multiple of the cluster");
    if (shape.early && !kernel.waits) fail("it may begin early, and does not wait for the kernels before");
    if (kernel.shared + shape.shared > 48 * 1024 && shape.shared > kernel.shared_of_launch_allowed)
        fail("more shared memory than 48 KiB, which nobody asked for");
}

void run_cluster(Cluster& cluster, int first) {
    const Kernel& kernel = *cluster.kernel;
    const Shape& shape = *cluster.shape;
    const int warps = shape.threads / LANES;
    cluster.serial = ++cluster_serial;
    cluster.arrived = cluster.barriers = 0;
    for (int b = 0; b < shape.cluster; b++) {
        Block& block = cluster.blocks[b];
        block.number = first + b;
        block.place = only < 0 ? block.number : b;
        block.rank = b;
        block.cluster = &cluster;
        block.warps_alive = warps;
        block.arrived = block.barriers = 0;
    }
    int alive = (int)cluster.warps.size();
    for (int n = 0; n < alive; n++) {
        cluster.warps[n].block = &cluster.blocks[n / warps];
        cluster.warps[n].number = n % warps;
        begin(cluster.warps[n], kernel, shape);
    }
    const int count = alive;
    while (alive) {
        bool progress = false;
        for (int n = 0; n < count; n++) {
            Warp& w = cluster.warps[shape.backwards ? count - 1 - n : n];
            if (w.state == Warp::AT_CLUSTER_BARRIER && cluster.barriers >= w.arrivals) {
                w.waits = w.arrivals;
                w.state = Warp::RUNS;
            }
            if (w.state != Warp::RUNS) continue;
            progress = true;
            run(w);
            alive -= w.state == Warp::ENDED;
        }
        if (!progress) throw Fault(kernel.name + ": threads wait for others that have ended, or that wait elsewhere");
    }
}

}  // namespace

void fail(const Warp& w, const Instruction& i, const std::string& what) {
    throw Fault(w.block->cluster->kernel->name + ": " + what + " (" + i.name + ", block " +
                std::to_string(w.block->number) + ", warp " + std::to_string(w.number) + ")");
}

int Warp::thread(int lane) const { return block->place * block->cluster->shape->threads + number * LANES + lane; }

void launch(const Kernel& kernel, const Shape& shape, const void* parameters) {
    check(kernel, shape);
    const unsigned state = _mm_getcsr();
    _mm_setcsr(0x1F80);  // the caller's flags do not reach a GPU
    launch_serial++;
    forget_pages();
    try {
        Cluster cluster;
        cluster.kernel = &kernel;
        cluster.shape = &shape;
        cluster.parameters = static_cast<const char*>(parameters);
        cluster.blocks.resize(shape.cluster);
        for (Block& block : cluster.blocks) {
            // What nobody wrote is a NaN, also in registers.
            block.memory.assign(kernel.shared + shape.shared, (char)0xFF);
            block.records.resize(block.memory.size() + 1);
        }
        cluster.warps.resize(shape.cluster * shape.threads / LANES);
        for (Warp& w : cluster.warps) w.registers.assign((size_t)kernel.registers * LANES, ~(u64)0);
        if (only >= 0) {
            noted.push_back({shape.grid, (int)std::min<i64>(only, shape.grid - 1), {}});
            run_cluster(cluster, noted.back().block / shape.cluster * shape.cluster);
        }
        for (int n = 0; n < shape.grid / shape.cluster && only < 0; n++)
            run_cluster(cluster, (shape.backwards ? shape.grid / shape.cluster - 1 - n : n) * shape.cluster);
    } catch (...) {
        _mm_setcsr(state);
        throw;
    }
    _mm_setcsr(state);
}

}  // namespace machine
