// What the ranks of one communicator share: a file in memory, or connections between their hosts; one row a rank. No one notices that a rank
// is gone.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "fake.h"

namespace fake {

// Results of NCCL that the stand-in gives (nccl.h, ncclResult_t).
enum : int {
  NCCL_SUCCESS = 0,
  NCCL_SYSTEM_ERROR = 2,
  NCCL_INVALID_ARGUMENT = 4,
  NCCL_INVALID_USAGE = 5,
  NCCL_IN_PROGRESS = 7,
};

const int MAX_RANKS = 64;
// Collectives whose description a row holds: more than can be under way.
const int WINDOW = 8;

// Root of a collective that has none.
const int ALL_REDUCE = -1;

// One collective as one rank entered it.
struct Entry {
  uint64_t bytes, offset;
  int32_t root;
  char file[64];
};

struct Row {
  std::atomic<int32_t> taken;
  int32_t version;
  char uuid[48];
  std::atomic<uint64_t> entered;   // collectives, the present one included
  std::atomic<uint64_t> finished;
  std::atomic<uint64_t> moved;     // bytes of the present collective: sent (root) or received
  Entry entries[WINDOW];
};

struct Board {
  std::atomic<uint32_t> bell;      // rung after every change
  std::atomic<int32_t> world;      // 0 until the first rank says it
  std::atomic<int32_t> error;      // what all ranks get when they do not fit together
  Row rows[MAX_RANKS];
};

class Links;

// One rank's place in a group. Waits end when what they wait for is there, or by `stop`.
class Group {
 public:
  static std::string create();  // the name of a new group, or nothing
  static bool create_named(const std::string &name);  // false when it is there already
  Group(std::string name, int world, int rank, int version, Device *device);
  ~Group();
  // Takes the row and waits for all others: a result.
  int join(const std::atomic<bool> &stop);
  // Gives the row's lock up: for those who wait for a rank that leaves.
  void leave();
  // Moves the bytes of root's span into everybody's. False when stopped.
  bool broadcast(const Span &span, int root, const DataFault &fault, const std::atomic<bool> &stop);
  // Sums the floats of everybody's span into everybody's. False when stopped.
  bool sum(const Span &span, const std::atomic<bool> &stop);

  const std::string name;
  const int world, rank;

 private:
  bool wait(const std::atomic<bool> &stop, const std::function<bool()> &reached);
  void ring(const std::atomic<bool> &stop);
  uint64_t enter(const Span &span, int root, const std::atomic<bool> &stop);
  bool send(uint64_t number, const Span &span, const DataFault &fault, const std::atomic<bool> &stop);
  bool receive(uint64_t number, const Span &span, int root, const Entry &entry, const DataFault &fault, const std::atomic<bool> &stop);
  bool all(const std::function<bool(Row &)> &hold);
  // What a rank named in its entry of that collective.
  char *named_by(int other, uint64_t number, const Entry &entry);

  const int version_;
  Device *const device_;
  Board *board_ = nullptr;
  std::unique_ptr<Links> links_;  // to ranks of other hosts
  int held_ = -1;  // the row's file, locked as long as the rank has the communicator
  uint64_t collectives_ = 0;
  std::map<std::string, std::pair<char *, size_t>> mapped_;
};

}  // namespace fake
