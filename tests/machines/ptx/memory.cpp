// Accesses to global memory (the process's own), to shared memory and to parameters. Each is checked: its bounds (of global
// memory by fences.c, if Python was started with it), its alignment, whether it races with another thread's.
#include "machine.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <unordered_map>

extern "C" int in_a_fence(const void* address, size_t bytes) __attribute__((weak));  // fences.c

namespace machine {

namespace {

// Races in global memory are looked for in launches of a few blocks: two blocks race where a hundred do, and what watches
// a page takes 32 times its size, and most of the time.
constexpr int PAGE = 4096, MOST_PAGES = 1024, MOST_BLOCKS = 16;

// Bytes of the widest access.
constexpr int MOST_BYTES = 8 * (MOST_OPERANDS - 2);

// Accesses to single bytes are watched apart from others where the address is odd: no kernel mixes both.
struct Page {
    Record records[PAGE / 2];
    std::unique_ptr<Record[]> odd;
};
std::unordered_map<u64, std::unique_ptr<Page>> pages;
u64 last_number = 0;
Page* last = nullptr;

// The record of two bytes of global memory, or of a single byte; nullptr where they are not watched.
Record* record_of(const Warp& w, u64 address) {
    if (w.block->cluster->shape->grid > MOST_BLOCKS) return nullptr;
    const u64 number = address / PAGE;
    if (last == nullptr || number != last_number) {
        std::unique_ptr<Page>& page = pages[number];
        if (!page) {
            if ((int)pages.size() > MOST_PAGES) {
                pages.erase(number);
                return nullptr;
            }
            page = std::make_unique<Page>();
        }
        last_number = number;
        last = page.get();
    }
    if (address % 2 && !last->odd) last->odd = std::make_unique<Record[]>(PAGE / 2);
    return &(address % 2 ? last->odd.get() : last->records)[address % PAGE / 2];
}

bool same_block(const Stamp& s, const Warp& w) {
    return s.thread / w.block->cluster->shape->threads == w.block->place;
}

// Whether what a stamp says was before what this thread does now: by the program's order, or by a barrier between.
bool before(const Stamp& s, const Warp& w, int thread, u32 serial) {
    if (s.serial != serial || s.thread == thread) return true;
    if (same_block(s, w) && s.block_barriers < w.block->barriers) return true;
    if (s.thread / LANES == thread / LANES && s.warp_barriers < w.barriers) return true;
    const Cluster& cluster = *w.block->cluster;
    const int block = s.thread / cluster.shape->threads;
    return block / cluster.shape->cluster == w.block->place / cluster.shape->cluster && s.arrivals < w.waits;
}

void note(Record& r, const Warp& w, const Instruction& i, int thread, u32 serial, bool writes, bool same_value) {
    const Stamp here{serial, thread, w.block->barriers, w.barriers, w.arrivals};
    if (r.read.serial != serial) r.read_by_blocks = false;
    if (writes) {
        if (!before(r.written, w, thread, serial) && !same_value)
            fail(w, i, "two threads write to the same place with no barrier between");
        if (r.read_by_blocks || !before(r.read, w, thread, serial) || !before(r.read_by_another, w, thread, serial))
            fail(w, i, "a thread writes what another reads with no barrier between");
        r.written = here;
    } else {
        if (!before(r.written, w, thread, serial))
            fail(w, i, "a thread reads what another writes with no barrier between");
        if (r.read.serial != serial || r.read.thread == thread) {
            r.read = here;
        } else {
            if (!same_block(r.read, w) && w.block->cluster->shape->cluster == 1) r.read_by_blocks = true;
            r.read_by_another = here;
        }
    }
}

struct Accesses {
    char* at[LANES];
    int bytes;
};

// Checks accesses, and notes those of a block that runs alone. Returns the lanes whose accesses go somewhere.
u32 check_global(Warp& w, const Instruction& i, u32 lanes, const Accesses& a, bool writes) {
    if (!w.waited_for_kernels_before) fail(w, i, "global memory is accessed before griddepcontrol.wait");
    each(lanes, [&](int l) {
        const u64 address = (u64)a.at[l];
        if (address % a.bytes) fail(w, i, "an address that is no multiple of " + std::to_string(a.bytes));
        if (in_a_fence && in_a_fence(a.at[l], a.bytes)) fail(w, i, "an address outside of its tensor's memory");
    });
    if (only >= 0) {
        each(lanes, [&](int l) {
            noted.back().accesses.push_back({(u64)a.at[l], a.bytes, writes});
            if ((u64)a.at[l] >= NOWHERE) lanes &= ~(1u << l);
        });
        return lanes;
    }
    if (!counting) return lanes;
    u64 sectors[LANES * 2];
    int count = 0;
    each(lanes, [&](int l) {
        for (u64 s = (u64)a.at[l] / 32; s <= ((u64)a.at[l] + a.bytes - 1) / 32; s++) sectors[count++] = s;
    });
    std::sort(sectors, sectors + count);
    i.units += std::unique(sectors, sectors + count) - sectors;
    return lanes;
}

// Passes of a warp over the 32 banks of 4 bytes; accesses of 8 and 16 bytes go by halves and quarters of the warp.
void count_passes(const Instruction& i, u32 lanes, const u32* offsets, int bytes) {
    const int at_once = LANES * 4 / std::max(bytes, 4);
    for (int first = 0; first < LANES; first += at_once) {
        std::vector<u32> words[32];
        size_t most = 0;
        for (int l = first; l < first + at_once; l++) {
            if (!(lanes >> l & 1)) continue;
            for (u32 word = offsets[l] / 4; word <= (offsets[l] + bytes - 1) / 4; word++) {
                std::vector<u32>& bank = words[word % 32];
                if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
                most = std::max(most, bank.size());
            }
        }
        i.units += most;
    }
}

// Addresses of shared memory are offsets; those of another block of the cluster have its rank, plus one, above.
constexpr int RANK = 24;

Block& block_of(Warp& w, const Instruction& i, u64 address, bool of_cluster) {
    Block* block = w.block;
    if (const u64 rank = (address & 0xFFFFFFFF) >> RANK) {
        if (!of_cluster) fail(w, i, "an address of the cluster's shared memory, taken for one of the block's");
        block = &block->cluster->blocks[rank - 1];
        if (!block->warps_alive) fail(w, i, "shared memory of a block that has ended");
    }
    return *block;
}

// Reads or writes `bytes` bytes of shared memory, two at a time, or one by one once a single one was accessed.
void access_shared(Warp& w, const Instruction& i, int lane, u64 address, int bytes, char* values, bool writes,
                   bool of_cluster) {
    Block& block = block_of(w, i, address, of_cluster);
    const u32 offset = address & ((1 << RANK) - 1);
    if (offset % bytes) fail(w, i, "an address that is no multiple of " + std::to_string(bytes));
    if (offset + bytes > block.memory.size()) fail(w, i, "an address outside of shared memory");
    const u32 serial = w.block->cluster->serial;
    if (bytes == 1 && !block.by_bytes) {
        for (size_t even = 0; even + 1 < block.records.size(); even += 2) block.records[even + 1] = block.records[even];
        block.by_bytes = true;
    }
    const int step = block.by_bytes ? 1 : 2;
    for (int b = 0; b < bytes; b += step) {
        Record& r = block.records[offset + b];
        char* memory = &block.memory[offset + b];
        if (!writes && r.written.serial != serial) fail(w, i, "shared memory is read that nobody wrote");
        note(r, w, i, w.thread(lane), serial, writes, writes && memcmp(memory, values + b, step) == 0);
        if (writes) memcpy(memory, values + b, step);
        else memcpy(values + b, memory, step);
    }
}

template <int BYTES, bool SIGNED> u64 widened(const char* from) {
    u64 value = 0;
    memcpy(&value, from, BYTES);
    return SIGNED ? (u64)((i64)(value << (64 - 8 * BYTES)) >> (64 - 8 * BYTES)) : value;
}

// Operands: the address's register, an offset, and a register for each element.
template <int BYTES, bool SIGNED> void load_global(Warp& w, const Instruction& i, u32 lanes) {
    Accesses a;
    a.bytes = BYTES * (i.count - 2);
    each(lanes, [&](int l) { a.at[l] = (char*)(w[i.operands[0]][l] + i.operands[1]); });
    const u32 somewhere = check_global(w, i, lanes, a, false);
    for (int k = 2; k < i.count; k++) each(lanes & ~somewhere, [&](int l) { w[i.operands[k]][l] = 0; });
    each(somewhere, [&](int l) {
        for (int b = 0; b < a.bytes; b += 2)
            if (Record* r = record_of(w, (u64)a.at[l] + b)) note(*r, w, i, w.thread(l), launch_serial, false, false);
        for (int k = 2; k < i.count; k++) w[i.operands[k]][l] = widened<BYTES, SIGNED>(a.at[l] + BYTES * (k - 2));
    });
}

template <int BYTES> void store_global(Warp& w, const Instruction& i, u32 lanes) {
    Accesses a;
    a.bytes = BYTES * (i.count - 2);
    each(lanes, [&](int l) { a.at[l] = (char*)(w[i.operands[0]][l] + i.operands[1]); });
    each(check_global(w, i, lanes, a, true), [&](int l) {
        char values[MOST_BYTES];
        for (int k = 2; k < i.count; k++) memcpy(values + BYTES * (k - 2), &w[i.operands[k]][l], BYTES);
        for (int b = 0; b < a.bytes; b += 2)
            if (Record* r = record_of(w, (u64)a.at[l] + b))
                note(*r, w, i, w.thread(l), launch_serial, true, memcmp(a.at[l] + b, values + b, std::min(a.bytes, 2)) == 0);
        memcpy(a.at[l], values, a.bytes);
    });
}

void count_shared(Warp& w, const Instruction& i, u32 lanes, int bytes) {
    if (!counting) return;
    u32 offsets[LANES];
    each(lanes, [&](int l) { offsets[l] = (w[i.operands[0]][l] + i.operands[1]) & ((1 << RANK) - 1); });
    count_passes(i, lanes, offsets, bytes);
}

template <int BYTES, bool SIGNED> void load_shared(Warp& w, const Instruction& i, u32 lanes) {
    const int bytes = BYTES * (i.count - 2);
    count_shared(w, i, lanes, bytes);
    each(lanes, [&](int l) {
        char values[MOST_BYTES];
        access_shared(w, i, l, w[i.operands[0]][l] + i.operands[1], bytes, values, false, false);
        for (int k = 2; k < i.count; k++) w[i.operands[k]][l] = widened<BYTES, SIGNED>(values + BYTES * (k - 2));
    });
}

template <int BYTES, bool OF_CLUSTER> void store_shared(Warp& w, const Instruction& i, u32 lanes) {
    const int bytes = BYTES * (i.count - 2);
    count_shared(w, i, lanes, bytes);
    each(lanes, [&](int l) {
        char values[MOST_BYTES];
        for (int k = 2; k < i.count; k++) memcpy(values + BYTES * (k - 2), &w[i.operands[k]][l], BYTES);
        access_shared(w, i, l, w[i.operands[0]][l] + i.operands[1], bytes, values, true, OF_CLUSTER);
    });
}

template <int BYTES, bool SIGNED> void load_parameter(Warp& w, const Instruction& i, u32 lanes) {
    const Cluster& cluster = *w.block->cluster;
    each(lanes, [&](int l) {
        const u64 offset = w[i.operands[0]][l] + i.operands[1];
        for (int k = 2; k < i.count; k++) {
            const u64 at = offset + BYTES * (k - 2);
            if (at + BYTES > (u64)cluster.kernel->parameters) fail(w, i, "a parameter that there is not");
            w[i.operands[k]][l] = widened<BYTES, SIGNED>(cluster.parameters + at);
        }
    });
}

// Matrices of 8 x 8 elements of two bytes: lane 8 * k + r has the address of row r of matrix k, and lane l gets or gives
// elements 2 * (l % 4) and the next of row l / 4, or, TURNED, of column l / 4. Operands as of loads.
template <bool WRITES, bool TURNED> void access_matrices(Warp& w, const Instruction& i, u32 lanes) {
    if (lanes != ~0u) fail(w, i, "a matrix of a part of a warp");
    u64 rows[LANES];  // a register of an address may also be one of a result
    for (int l = 0; l < LANES; l++) rows[l] = w[i.operands[0]][l] + i.operands[1];
    for (int k = 2; k < i.count; k++) {
        for (int l = 0; l < LANES; l++) {
            u64& value = w[i.operands[k]][l];
            char bytes[4];
            memcpy(bytes, &value, 4);
            for (int e = 0; e < 2; e++) {
                const int element = 2 * (l % 4) + e, other = l / 4;
                const u64 row = rows[8 * (k - 2) + (TURNED ? element : other)];
                if (row % 16) fail(w, i, "a row of a matrix at an address that is no multiple of 16");
                access_shared(w, i, l, row + 2 * (TURNED ? other : element), 2, bytes + 2 * e, WRITES, false);
            }
            if (!WRITES) value = widened<4, false>(bytes);
        }
    }
    if (!counting) return;
    i.units += i.count - 2;  // a pass for each matrix, whose rows are apart
}

// A copy from global to shared memory that goes on beside the program: operands are both addresses and offsets, how many
// bytes, and how many of them are read; the others become zeros. Until it has been waited for, what is there is undefined.
void begin_copy(Warp& w, const Instruction& i, u32 lanes) {
    each(lanes, [&](int l) {
        const u64 to = w[i.operands[0]][l] + i.operands[1], from = w[i.operands[2]][l] + i.operands[3];
        const int bytes = (int)w[i.operands[4]][l], given = (int)w[i.operands[5]][l];
        if (given != 0 && given != bytes) fail(w, i, "a copy of a part of its bytes");
        if (given && from % bytes) fail(w, i, "an address that is no multiple of " + std::to_string(bytes));
        char undefined[MOST_BYTES];
        memset(undefined, 0xFF, sizeof undefined);
        access_shared(w, i, l, to, bytes, undefined, true, false);
        w.copies.push_back({l, bytes, to, from, given == 0});
    });
}

// Waits for all groups of copies but the last ones: the operand says how many.
void wait_for_copies(Warp& w, const Instruction& i, u32 lanes) {
    if (lanes != ~0u) fail(w, i, "a part of a warp waits for copies");
    const size_t left = std::min<size_t>(w[i.operands[0]][0], w.groups.size());
    const size_t over = w.groups.size() - left, count = over ? w.groups[over - 1] : 0;
    for (size_t n = 0; n < count; n++) {
        const Copy& copy = w.copies[n];
        char values[MOST_BYTES] = {0};
        Accesses a;
        a.bytes = copy.bytes;
        a.at[copy.lane] = (char*)copy.from;
        if (!copy.zeros && check_global(w, i, 1u << copy.lane, a, false)) {
            for (int b = 0; b < copy.bytes; b += 2)
                if (Record* r = record_of(w, copy.from + b)) note(*r, w, i, w.thread(copy.lane), launch_serial, false, false);
            memcpy(values, (char*)copy.from, copy.bytes);
        }
        access_shared(w, i, copy.lane, copy.to, copy.bytes, values, true, false);
    }
    w.copies.erase(w.copies.begin(), w.copies.begin() + count);
    w.groups.erase(w.groups.begin(), w.groups.begin() + over);
    for (size_t& end : w.groups) end -= count;
}

template <int BYTES, bool SIGNED>
void add_types(std::map<std::string, std::pair<Handler, Kind>>& to, const std::string& vector, const char* type) {
    auto set = [&](const std::string& name, Handler handler) { to[name + vector + "." + type] = {handler, PLAIN}; };
    set("ld.global", load_global<BYTES, SIGNED>);
    set("st.global", store_global<BYTES>);
    set("ld.shared", load_shared<BYTES, SIGNED>);
    set("st.shared", store_shared<BYTES, false>);
    set("st.shared::cluster", store_shared<BYTES, true>);
    set("ld.param", load_parameter<BYTES, SIGNED>);
}

}  // namespace

void forget_pages() {
    if ((int)pages.size() < MOST_PAGES) return;
    pages.clear();
    last = nullptr;
}

void add_memory(std::map<std::string, std::pair<Handler, Kind>>& to) {
    for (const char* vector : {"", ".v2", ".v4", ".v8"}) {
        for (const char* type : {"b16", "u16"}) add_types<2, false>(to, vector, type);
        for (const char* type : {"b32", "u32", "f32"}) add_types<4, false>(to, vector, type);
        for (const char* type : {"b64", "u64", "f64", "s64"}) add_types<8, false>(to, vector, type);
        add_types<2, true>(to, vector, "s16");
        add_types<4, true>(to, vector, "s32");
    }
    for (const char* type : {"b8", "v2.b8", "v4.b8", "u8", "v2.u8", "v4.u8"}) {
        to[std::string("ld.global.") + type] = {load_global<1, false>, PLAIN};
        to[std::string("st.global.") + type] = {store_global<1>, PLAIN};
        to[std::string("ld.shared.") + type] = {load_shared<1, false>, PLAIN};
        to[std::string("st.shared.") + type] = {store_shared<1, false>, PLAIN};
    }
    to["cp.async.ca.shared.global"] = to["cp.async.cg.shared.global"] = {begin_copy, PLAIN};
    to["cp.async.commit_group"] = {[](Warp& w, const Instruction&, u32) { w.groups.push_back(w.copies.size()); }, TOGETHER};
    to["cp.async.wait_group"] = {wait_for_copies, TOGETHER};
    for (const char* count : {"x1", "x2", "x4"}) {
        const std::string of = std::string(".sync.aligned.m8n8.") + count;
        to["ldmatrix" + of + ".shared.b16"] = {access_matrices<false, false>, TOGETHER};
        to["ldmatrix" + of + ".trans.shared.b16"] = {access_matrices<false, true>, TOGETHER};
        to["stmatrix" + of + ".shared.b16"] = {access_matrices<true, false>, TOGETHER};
        to["stmatrix" + of + ".trans.shared.b16"] = {access_matrices<true, true>, TOGETHER};
    }
    to["mapa.shared::cluster.u32"] = {[](Warp& w, const Instruction& i, u32 lanes) {
                                          u64 *d = w[i.operands[0]], *a = w[i.operands[1]], *rank = w[i.operands[2]];
                                          each(lanes, [&](int l) {
                                              if ((u32)rank[l] >= w.block->cluster->blocks.size())
                                                  fail(w, i, "there is no such block in the cluster");
                                              d[l] = (a[l] & ((1 << RANK) - 1)) | ((rank[l] + 1) << RANK);
                                          });
                                      },
                                      PLAIN};
}

}  // namespace machine
