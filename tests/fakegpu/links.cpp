// TCP between ranks: a meeting where they learn each other's addresses, as NCCL's bootstrap is one, then a connection for each pair. A rank
// that is gone is not noticed here either: its connection ends, and the others wait.
#include <climits>
#include <cstring>

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "links.h"

namespace fake {

namespace {

const char MARK[] = "tcp:";
const uint32_t MAGIC = 0x6e63636c;
// How long a look at `stop` may take.
const int MOMENT_MS = 10;

// What a rank says at the meeting, and to another rank: where it listens.
struct Hello {
  uint32_t magic;
  int32_t rank, world;
  sockaddr_in at;
};

// Before what a rank shows or gives.
struct Head {
  enum Kind : uint32_t { Row, Part } kind;
  uint32_t magic;
  uint64_t number, offset, length, bytes;
};

// A row, as it travels.
struct Shown {
  int32_t taken, version;
  char uuid[48];
  uint64_t entered, finished, moved;
  Entry entries[WINDOW];
};

int listener(const in_addr &address, sockaddr_in *at) {
  int socket_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  *at = {};
  at->sin_family = AF_INET;
  at->sin_addr = address;
  socklen_t length = sizeof *at;
  if (socket_ < 0) return -1;
  if (bind(socket_, reinterpret_cast<sockaddr *>(at), length) || listen(socket_, MAX_RANKS) ||
      getsockname(socket_, reinterpret_cast<sockaddr *>(at), &length)) {
    close(socket_);
    return -1;
  }
  return socket_;
}

// Waits until something can be read or written; false when stopped.
bool ready(int socket_, short what, const std::atomic<bool> &stop) {
  pollfd one = {socket_, what, 0};
  while (!stop)
    if (poll(&one, 1, MOMENT_MS) > 0) return true;
  return false;
}

bool transfer(int socket_, void *bytes, size_t length, bool out, const std::atomic<bool> &stop) {
  char *at = static_cast<char *>(bytes);
  while (length) {
    ssize_t moved = out ? send(socket_, at, length, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(socket_, at, length, MSG_DONTWAIT);
    if (moved > 0) {
      at += moved;
      length -= size_t(moved);
    } else if (moved == 0 || (errno != EAGAIN && errno != EINTR)) {
      return false;
    } else if (!ready(socket_, out ? POLLOUT : POLLIN, stop)) {
      return false;
    }
  }
  return true;
}

int connected(const sockaddr_in &to, const std::atomic<bool> &stop) {
  int socket_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (socket_ < 0) return -1;
  int error = 0, yes = 1;
  socklen_t length = sizeof error;
  setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  bool begun = connect(socket_, reinterpret_cast<const sockaddr *>(&to), sizeof to) == 0 || errno == EINPROGRESS;
  if (begun && ready(socket_, POLLOUT, stop) && !getsockopt(socket_, SOL_SOCKET, SO_ERROR, &error, &length) && !error) return socket_;
  close(socket_);
  return -1;
}

// Hears a rank; -1 for one that is none, or where it was stopped.
int accepted(int listening, Hello *hello, const std::atomic<bool> &stop) {
  int yes = 1;
  if (!ready(listening, POLLIN, stop)) return -1;
  int socket_ = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (socket_ < 0) return -1;
  setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  if (transfer(socket_, hello, sizeof *hello, false, stop) && hello->magic == MAGIC) return socket_;
  close(socket_);
  return -1;
}

// Until all ranks have said where they listen; then each hears of all. For ever, where one never comes.
void hold_meeting(int listening) {
  static const std::atomic<bool> never{false};
  std::vector<sockaddr_in> places;
  std::vector<int> sockets;
  for (size_t come = 0; sockets.empty() || come < sockets.size();) {
    Hello hello;
    int socket_ = accepted(listening, &hello, never);
    if (socket_ < 0) continue;
    if (sockets.empty() && hello.world > 0 && hello.world <= MAX_RANKS) {
      sockets.assign(size_t(hello.world), -1);
      places.resize(size_t(hello.world));
    }
    if (size_t(hello.world) != sockets.size() || hello.rank < 0 || hello.rank >= hello.world || sockets[size_t(hello.rank)] >= 0) {
      violation("rank %d of %d at a meeting of %zu", hello.rank, hello.world, sockets.size());
      close(socket_);
      continue;
    }
    sockets[size_t(hello.rank)] = socket_;
    places[size_t(hello.rank)] = hello.at;
    come++;
  }
  for (int socket_ : sockets) {
    transfer(socket_, places.data(), places.size() * sizeof(sockaddr_in), true, never);
    close(socket_);
  }
  close(listening);
}

}  // namespace

bool is_meeting(const std::string &name) { return name.rfind(MARK, 0) == 0; }

std::string open_meeting(const std::string &address) {
  in_addr parsed;
  sockaddr_in at;
  if (inet_pton(AF_INET, address.c_str(), &parsed) != 1) fatal("FAKEGPU_NCCL_ADDRESS is no address: %s", address.c_str());
  int listening = listener(parsed, &at);
  if (listening < 0) return "";
  std::thread([listening] { hold_meeting(listening); }).detach();
  return MARK + address + ":" + std::to_string(ntohs(at.sin_port));
}

Links::Links(Board *board, int world, int rank)
    : board_(board), world_(world), rank_(rank), sockets_(size_t(world), -1), brought_(size_t(world)) {}

Links::~Links() {
  for (int socket_ : sockets_)
    if (socket_ >= 0) shutdown(socket_, SHUT_RDWR);
  for (std::thread &reader : readers_) reader.join();
  for (int socket_ : sockets_)
    if (socket_ >= 0) close(socket_);
}

bool Links::meet(const std::string &name, const std::atomic<bool> &stop) {
  size_t colon = name.rfind(':');
  std::string host = name.substr(strlen(MARK), colon - strlen(MARK));
  Hello hello = {MAGIC, rank_, world_, {}};
  sockaddr_in meeting = {};
  meeting.sin_family = AF_INET;
  meeting.sin_port = htons(uint16_t(atoi(name.c_str() + colon + 1)));
  if (inet_pton(AF_INET, host.c_str(), &meeting.sin_addr) != 1) return false;
  int there = connected(meeting, stop);
  if (there < 0) return false;
  // Others reach this rank at the address that it reaches the meeting from.
  sockaddr_in own;
  socklen_t length = sizeof own;
  std::vector<sockaddr_in> places(static_cast<size_t>(world_));
  int listening = getsockname(there, reinterpret_cast<sockaddr *>(&own), &length) ? -1 : listener(own.sin_addr, &hello.at);
  bool met = listening >= 0 && transfer(there, &hello, sizeof hello, true, stop) &&
             transfer(there, places.data(), places.size() * sizeof(sockaddr_in), false, stop);
  close(there);
  // The higher of two ranks asks the lower one.
  for (int other = 0; met && other < rank_; other++) {
    int socket_ = sockets_[size_t(other)] = connected(places[size_t(other)], stop);
    met = socket_ >= 0 && transfer(socket_, &hello, sizeof hello, true, stop);
  }
  for (int missing = world_ - 1 - rank_; met && missing > 0;) {
    Hello theirs;
    int socket_ = accepted(listening, &theirs, stop);
    met = !stop;
    if (socket_ < 0) continue;
    if (theirs.rank <= rank_ || theirs.rank >= world_ || sockets_[size_t(theirs.rank)] >= 0) {
      close(socket_);
      continue;
    }
    sockets_[size_t(theirs.rank)] = socket_;
    missing--;
  }
  if (listening >= 0) close(listening);
  for (int other = 0; met && other < world_; other++)
    if (other != rank_) readers_.emplace_back([this, other] { listen_to(other); });
  return met;
}

void Links::write(int other, const void *from, size_t length, const std::atomic<bool> &stop) {
  int socket_ = sockets_[size_t(other)];
  // One that is gone is not noticed.
  if (socket_ >= 0) transfer(socket_, const_cast<void *>(from), length, true, stop);
}

void Links::show(const std::atomic<bool> &stop) {
  std::lock_guard<std::mutex> lock(writing_);
  Row &row = board_->rows[rank_];
  struct {
    Head head;
    Shown shown;
  } whole = {{Head::Row, MAGIC, 0, 0, sizeof(Shown), 0}, {row.taken, row.version, "", row.entered, row.finished, row.moved, {}}};
  memcpy(whole.shown.uuid, row.uuid, sizeof row.uuid);
  memcpy(whole.shown.entries, row.entries, sizeof row.entries);
  for (int other = 0; other < world_; other++) write(other, &whole, sizeof whole, stop);
}

void Links::give(uint64_t number, uint64_t offset, const char *from, uint64_t length, uint64_t bytes, const std::atomic<bool> &stop) {
  std::lock_guard<std::mutex> lock(writing_);
  Head head = {Head::Part, MAGIC, number, offset, length, bytes};
  for (int other = 0; other < world_; other++) {
    write(other, &head, sizeof head, stop);
    write(other, from, length, stop);
  }
}

char *Links::brought(int other, uint64_t number, uint64_t bytes) {
  Brought &place = brought_[size_t(other)];
  std::lock_guard<std::mutex> lock(place.mutex);
  if (place.number != number) {
    place.number = number;
    place.bytes.assign(bytes, 0);
  }
  return place.bytes.data();
}

void Links::listen_to(int other) {
  static const std::atomic<bool> never{false};
  const int socket_ = sockets_[size_t(other)];
  Row &row = board_->rows[other];
  Head head;
  while (transfer(socket_, &head, sizeof head, false, never) && head.magic == MAGIC) {
    if (head.kind == Head::Part) {
      if (head.offset + head.length > head.bytes) fatal("rank %d gives more than it said", other);
      if (!transfer(socket_, brought(other, head.number, head.bytes) + head.offset, head.length, false, never)) return;
      continue;
    }
    Shown shown;
    if (!transfer(socket_, &shown, sizeof shown, false, never)) return;
    memcpy(row.uuid, shown.uuid, sizeof row.uuid);
    memcpy(row.entries, shown.entries, sizeof row.entries);
    row.version = shown.version;
    row.moved = shown.moved;
    row.finished = shown.finished;
    // What follows is looked at only when these say so.
    row.entered = shown.entered;
    row.taken = shown.taken;
    board_->bell++;
    syscall(SYS_futex, &board_->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

}  // namespace fake
