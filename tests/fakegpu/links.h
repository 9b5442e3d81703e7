// For groups whose ranks have no machine in common: each process keeps a board of its own, and what a rank changes travels over TCP.
#pragma once

#include <string>
#include <thread>
#include <vector>

#include "group.h"

namespace fake {

// Where the ranks of a new group meet, at this address of the host: the group's name. Empty where no one can listen there.
std::string open_meeting(const std::string &address);
// Whether a group of that name meets over TCP.
bool is_meeting(const std::string &name);

// One connection to each other rank.
class Links {
 public:
  Links(Board *board, int world, int rank);
  ~Links();
  // Finds the others by the group's name. False when stopped, or when no one holds that meeting.
  bool meet(const std::string &name, const std::atomic<bool> &stop);
  // Shows all others what this rank's row holds now.
  void show(const std::atomic<bool> &stop);
  // Gives all others a part of what this rank brings into a collective of `bytes`.
  void give(uint64_t number, uint64_t offset, const char *from, uint64_t length, uint64_t bytes, const std::atomic<bool> &stop);
  // What another rank brought into that collective, as far as it has come.
  char *brought(int other, uint64_t number, uint64_t bytes);

 private:
  struct Brought {
    std::mutex mutex;
    uint64_t number = 0;
    std::vector<char> bytes;
  };
  void write(int other, const void *from, size_t length, const std::atomic<bool> &stop);
  void listen_to(int other);

  Board *const board_;
  const int world_, rank_;
  std::vector<int> sockets_;
  std::vector<Brought> brought_;
  std::vector<std::thread> readers_;
  std::mutex writing_;
};

}  // namespace fake
