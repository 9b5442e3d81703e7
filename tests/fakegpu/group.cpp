// Ranks of one communicator find each other and move bytes. As with NCCL, a rank that is dead or elsewhere is simply waited for.
#include <algorithm>
#include <climits>
#include <csignal>
#include <cstring>
#include <vector>

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "links.h"

namespace fake {

static std::string path_of(const std::string &name) { return folder() + "/groups/" + name; }

bool Group::create_named(const std::string &name) {
  char *at = map_shared(path_of(name), sizeof(Board), true);
  if (at) munmap(at, sizeof(Board));
  return at;
}

std::string Group::create() {
  if (const char *address = getenv("FAKEGPU_NCCL_ADDRESS")) return open_meeting(address);
  static std::atomic<int> serial{0};
  std::string name = "group-" + std::to_string(getpid()) + "-" + std::to_string(++serial);
  return create_named(name) ? name : "";
}

Group::Group(std::string name, int world, int rank, int version, Device *device)
    : name(std::move(name)), world(world), rank(rank), version_(version), device_(device) {}

Group::~Group() {
  leave();
  links_ = nullptr;
  for (auto &[file, at] : mapped_) munmap(at.first, at.second);
  if (board_) munmap(board_, sizeof(Board));
}

void Group::leave() {
  if (held_ < 0) return;
  unlink((path_of(name) + "." + std::to_string(rank)).c_str());
  close(held_);
  held_ = -1;
}

void Group::ring(const std::atomic<bool> &stop) {
  if (links_) links_->show(stop);
  board_->bell++;
  syscall(SYS_futex, &board_->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// `stop` rings no bell, so it is looked at now and then.
bool Group::wait(const std::atomic<bool> &stop, const std::function<bool()> &reached) {
  const timespec now_and_then = {0, 10'000'000};
  for (;;) {
    uint32_t heard = board_->bell;
    if (stop) return false;
    if (reached()) return true;
    syscall(SYS_futex, &board_->bell, FUTEX_WAIT, heard, &now_and_then, nullptr, 0);
  }
}

bool Group::all(const std::function<bool(Row &)> &hold) {
  for (int other = 0; other < world; other++)
    if (!hold(board_->rows[other])) return false;
  return true;
}

int Group::join(const std::atomic<bool> &stop) {
  if (is_meeting(name)) {
    void *at = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return NCCL_SYSTEM_ERROR;
    board_ = static_cast<Board *>(at);
    links_ = std::make_unique<Links>(board_, world, rank);
    if (!links_->meet(name, stop)) return stop ? NCCL_IN_PROGRESS : NCCL_SYSTEM_ERROR;
  } else {
    board_ = reinterpret_cast<Board *>(map_shared(path_of(name), sizeof(Board), false));
  }
  // All met already, or the id is of another machine.
  if (!board_) return NCCL_SYSTEM_ERROR;
  Row &row = board_->rows[rank];
  int32_t no_one = 0, unsaid = 0;
  if (!row.taken.compare_exchange_strong(no_one, -1)) {
    violation("two ranks %d in %s", rank, name.c_str());
    board_->error = NCCL_INVALID_USAGE;
  } else {
    row.version = version_;
    snprintf(row.uuid, sizeof row.uuid, "%s", device_->uuid_text.c_str());
    // The lock ends with the process, however it ends.
    held_ = open((path_of(name) + "." + std::to_string(rank)).c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (held_ >= 0) flock(held_, LOCK_EX);
    row.taken = getpid();
  }
  if (!board_->world.compare_exchange_strong(unsaid, world) && unsaid != world) {
    violation("rank %d of %s says %d ranks, another %d", rank, name.c_str(), world, unsaid);
    board_->error = NCCL_INVALID_USAGE;
  }
  ring(stop);
  if (!wait(stop, [&] { return board_->error || all([](Row &other) { return other.taken > 0; }); })) return NCCL_IN_PROGRESS;
  if (board_->error) return board_->error;
  unlink(path_of(name).c_str());
  for (int other = 0; other < world; other++) {
    Row &theirs = board_->rows[other];
    // nccl init.c: "Mismatched NCCL version detected", "Duplicate GPU detected".
    if (theirs.version != version_ || (other != rank && !strcmp(theirs.uuid, row.uuid))) return NCCL_INVALID_USAGE;
  }
  nap(setting("FAKEGPU_NCCL_INIT_MS", 0) * 1000);
  return NCCL_SUCCESS;
}

// Says what this rank enters: its number.
uint64_t Group::enter(const Span &span, int root, const std::atomic<bool> &stop) {
  const uint64_t number = ++collectives_;
  Row &row = board_->rows[rank];
  Entry &entry = row.entries[number % WINDOW];
  entry = {span.size, uint64_t(span.bytes - span.memory->bytes), root, ""};
  snprintf(entry.file, sizeof entry.file, "%s", span.memory->file.c_str());
  row.moved = 0;
  if (links_ && root == ALL_REDUCE) links_->give(number, 0, span.bytes, span.size, span.size, stop);
  row.entered = number;
  ring(stop);
  return number;
}

bool Group::sum(const Span &span, const std::atomic<bool> &stop) {
  const uint64_t number = enter(span, ALL_REDUCE, stop);
  Row &row = board_->rows[rank];
  if (!wait(stop, [&] { return all([&](Row &other) { return other.entered >= number; }); })) return false;
  std::vector<float> total(span.size / sizeof(float));
  for (int other = 0; other < world; other++) {
    const Entry theirs = board_->rows[other].entries[number % WINDOW];
    if (theirs.root != ALL_REDUCE || theirs.bytes != span.size) {
      violation("collective %llu of %s: rank %d sums %zu bytes, rank %d does something else", (unsigned long long)number, name.c_str(), rank, span.size, other);
      return wait(stop, [] { return false; });
    }
    char *from = other == rank ? span.bytes : named_by(other, number, theirs);
    if (!from) return wait(stop, [] { return false; });
    for (size_t at = 0; at < total.size(); at++) total[at] += reinterpret_cast<float *>(from)[at];
  }
  row.moved = span.size;
  ring(stop);
  // No one writes its result while another one still reads.
  if (!wait(stop, [&] { return all([&](Row &other) { return other.moved >= span.size || other.finished >= number; }); })) return false;
  memcpy(span.bytes, total.data(), span.size);
  row.finished = number;
  ring(stop);
  return true;
}

bool Group::broadcast(const Span &span, int root, const DataFault &fault, const std::atomic<bool> &stop) {
  const uint64_t number = enter(span, root, stop);
  Row &row = board_->rows[rank], &sender = board_->rows[root];
  if (!wait(stop, [&] { return all([&](Row &other) { return other.entered >= number; }); })) return false;
  const Entry theirs = sender.entries[number % WINDOW];
  if (theirs.root != root || theirs.bytes != span.size) {
    violation("collective %llu of %s: rank %d broadcasts %zu bytes from rank %d, rank %d %llu from rank %d", (unsigned long long)number,
              name.c_str(), rank, span.size, root, root, (unsigned long long)theirs.bytes, theirs.root);
    return wait(stop, [] { return false; });
  }
  bool moved = rank == root ? send(number, span, fault, stop) : receive(number, span, root, theirs, fault, stop);
  if (!moved) return false;
  row.finished = number;
  ring(stop);
  // The sender's buffer is its own again when everybody has read it.
  return rank != root || wait(stop, [&] { return all([&](Row &other) { return other.finished >= number; }); });
}

// Bytes go in pieces, a few ahead of the slowest receiver: when one side stops, so does the other.
static uint64_t piece_of(uint64_t bytes) { return std::max<uint64_t>(4096, std::min<uint64_t>(1 << 20, bytes / 16)); }

bool Group::send(uint64_t number, const Span &span, const DataFault &fault, const std::atomic<bool> &stop) {
  Row &row = board_->rows[rank];
  const uint64_t bytes = span.size;
  const uint64_t piece = piece_of(bytes), ahead = 4 * piece;
  const long speed = setting("FAKEGPU_NCCL_MBPS", 0);
  for (uint64_t sent = 0; sent < bytes;) {
    if (fault.kind == DataFault::Vanish && sent >= bytes / 2) raise(SIGKILL);
    const uint64_t before = sent;
    sent = std::min(bytes, sent + piece);
    if (speed) nap(long(piece) / speed);
    if (links_) links_->give(number, before, span.bytes + before, sent - before, bytes, stop);
    row.moved = sent;
    ring(stop);
    // One that has it all may be in the next collective already.
    auto near = [&](Row &other) { return &other == &row || other.moved + ahead >= sent || other.finished >= number; };
    if (!wait(stop, [&] { return all(near); })) return false;
  }
  return true;
}

char *Group::named_by(int other, uint64_t number, const Entry &entry) {
  if (links_) return links_->brought(other, number, entry.bytes);
  auto &known = mapped_[entry.file];
  if (known.first) return known.first + entry.offset;
  struct stat about = {};
  std::string path = folder() + "/memory/" + entry.file;
  if (stat(path.c_str(), &about)) return nullptr;
  known = {map_shared(path, size_t(about.st_size), false), size_t(about.st_size)};
  return known.first ? known.first + entry.offset : nullptr;
}

bool Group::receive(uint64_t number, const Span &span, int root, const Entry &entry, const DataFault &fault,
                    const std::atomic<bool> &stop) {
  Row &row = board_->rows[rank], &sender = board_->rows[root];
  char *from = named_by(root, number, entry);
  // The sender died and its memory was given back.
  if (!from) return wait(stop, [] { return false; });
  for (uint64_t got = 0; got < span.size;) {
    if (fault.kind == DataFault::Vanish && got >= span.size / 2) raise(SIGKILL);
    if (!wait(stop, [&] { return sender.moved > got; })) return false;
    uint64_t until = sender.moved;
    if (fault.kind != DataFault::Drop) memcpy(span.bytes + got, from + got, until - got);
    row.moved = got = until;
    ring(stop);
  }
  if (fault.kind == DataFault::Flip) span.bytes[std::min(fault.first, span.size - 1)] ^= 1;
  if (fault.kind == DataFault::SwapRanges) {
    if (std::max(fault.first, fault.second) + fault.bytes > span.size) fatal("a swap beyond the end of %zu bytes", span.size);
    std::swap_ranges(span.bytes + fault.first, span.bytes + fault.first + fault.bytes, span.bytes + fault.second);
  }
  return true;
}

}  // namespace fake
