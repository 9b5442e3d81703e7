// Settings, reports of broken rules, and ordered faults.
#include <climits>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fake.h"

namespace fake {

static std::string make_folder() {
  const char *named = getenv("FAKEGPU_DIR");
  std::string path = named ? named : "/dev/shm/fakegpu-" + std::to_string(getuid());
  mkdir(path.c_str(), 0700);
  for (const char *part : {"memory", "events", "groups", "fired"}) mkdir((path + "/" + part).c_str(), 0700);
  return path;
}

// Never destroyed, like everything here: threads of streams outlive `main`.
const std::string &folder() {
  static const std::string *path = new std::string(make_folder());
  return *path;
}

long setting(const char *name, long otherwise) {
  const char *value = getenv(name);
  return value && *value ? strtol(value, nullptr, 10) : otherwise;
}

bool alive(int pid) { return kill(pid, 0) == 0 || errno == EPERM; }

void nap(long microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

static void report(const char *format, va_list arguments) {
  char text[1024];
  int length = snprintf(text, sizeof text, "fakegpu[%d]: ", getpid());
  length += vsnprintf(text + length, sizeof text - length - 1, format, arguments);
  if (length > int(sizeof text) - 2) length = sizeof text - 2;
  text[length++] = '\n';
  // One write each: lines of several processes do not mix.
  (void)!write(2, text, length);
  int file = open((folder() + "/violations").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (file < 0) return;
  (void)!write(file, text, length);
  close(file);
}

void violation(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  report(format, arguments);
  va_end(arguments);
}

void fatal(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  report(format, arguments);
  va_end(arguments);
  abort();
}

struct Order {
  std::string line, function, action;
  int gpu = -1;       // only processes whose current context is on it
  long call = 0;      // 0: every call
  long number[3] = {};
};

static std::vector<Order> parse(std::istream &text) {
  std::vector<Order> orders;
  for (std::string line; std::getline(text, line);) {
    std::istringstream words(line);
    Order order;
    std::string function, call;
    if (!(words >> function) || function[0] == '#') continue;
    if (!(words >> call >> order.action)) fatal("not a fault: %s", line.c_str());
    for (long &number : order.number) words >> number;
    order.line = line;
    order.function = function.substr(0, function.find('@'));
    if (order.function.size() < function.size()) order.gpu = atoi(function.c_str() + order.function.size() + 1);
    order.call = call == "*" ? 0 : atol(call.c_str());
    orders.push_back(order);
  }
  return orders;
}

// An order with a number is carried out once on the whole machine: a worker that is started again is not hit again.
static bool claim(const Order &order) {
  if (!order.call) return true;
  std::string mark = folder() + "/fired/" + std::to_string(std::hash<std::string>{}(order.line));
  int file = open(mark.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) return false;
  (void)!write(file, order.line.data(), order.line.size());
  close(file);
  return true;
}

// The file may be written at any time, so its time is looked at in every call.
static std::vector<Order> orders_now() {
  static std::vector<Order> *orders = new std::vector<Order>;
  static timespec read_at = {};
  struct stat about = {};
  std::string path = folder() + "/faults";
  if (stat(path.c_str(), &about)) return {};
  if (memcmp(&read_at, &about.st_mtim, sizeof read_at)) {
    read_at = about.st_mtim;
    std::ifstream file(path);
    *orders = parse(file);
  }
  return *orders;
}

static void carry_out(const Order &order, DataFault *data, int *result) {
  const std::string &action = order.action;
  auto bytes = [&](DataFault::Kind kind) {
    if (!data) fatal("%s moves no bytes between ranks: %s", order.function.c_str(), order.line.c_str());
    *data = {kind, size_t(order.number[0]), size_t(order.number[1]), size_t(order.number[2])};
  };
  if (action == "error") *result = int(order.number[0]);
  else if (action == "hang") for (;;) pause();
  else if (action == "delay") nap(order.number[0] * 1000);
  else if (action == "die") raise(SIGKILL);
  else if (action == "vanish") bytes(DataFault::Vanish);
  else if (action == "flip") bytes(DataFault::Flip);
  else if (action == "drop") bytes(DataFault::Drop);
  else if (action == "swap" && order.number[2]) bytes(DataFault::SwapRanges);
  else if (action == "swap") bytes(DataFault::SwapNext);
  else fatal("no such fault: %s", order.line.c_str());
}

int enter(const char *function, DataFault *data) {
  static std::mutex *mutex = new std::mutex;
  static auto *calls = new std::map<std::string, long>;
  std::vector<Order> due;
  {
    std::lock_guard<std::mutex> lock(*mutex);
    long call = ++(*calls)[function];
    for (Order &order : orders_now()) {
      if (order.function != function || (order.call && order.call != call)) continue;
      if (order.gpu >= 0 && (!current() || current()->number != order.gpu)) continue;
      due.push_back(order);
    }
  }
  int result = 0;
  for (const Order &order : due)
    if (claim(order)) carry_out(order, data, &result);
  return result;
}

}  // namespace fake
