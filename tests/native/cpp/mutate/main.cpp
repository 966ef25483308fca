// Mutation driver: valid inputs of the engine, changed at random, deterministic by seed.
//
//   llmdd_mutation_test SEEDS [SECONDS [FIRST_SEED]]
//
// Runs the seeds of the file SEEDS, each a line "target seed", and then new ones for SECONDS
// (default 10), counted from FIRST_SEED (default 1). With SECONDS 0 it writes instead, from
// FIRST_SEED on, one seed for each way in which an input is received: the file SEEDS was made so.
// Exit status 0: every check held.
#include <cctype>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <string>

#include "check.h"
#include "mutate/targets.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

namespace {

using Target = std::string (*)(llmdd::test::Random&);

const std::map<std::string, Target> kTargets = {
    {"message", llmdd::test::try_message},
    {"stream", llmdd::test::try_stream},
    {"request", llmdd::test::try_request},
    {"handshake", llmdd::test::try_handshake},
    {"runs", llmdd::test::try_runs},
    {"cache_table", llmdd::test::try_cache_table},
    {"reservations", llmdd::test::try_reservations},
};
constexpr size_t kWordsBytes = 32;  // behind them comes what the input itself contained
constexpr uint64_t kSeedsOfCorpus = 20'000;

// What runs now, for the last words of a process that fails.
const char* current_target = "none";
uint64_t current_seed = 0;

void say_what_failed() {
  std::fprintf(stderr, "repeat with the seed line: %s %llu\n", current_target,
               static_cast<unsigned long long>(current_seed));
}

std::string run(const std::string& name, Target target, uint64_t seed) {
  current_target = name.c_str();
  current_seed = seed;
  llmdd::test::Random random(seed);
  return target(random);
}

// Numbers and names differ from input to input, the words around them say what happened.
std::string words_of(const std::string& outcome) {
  std::string words;
  for (unsigned char letter : outcome.substr(0, kWordsBytes)) {
    if (std::isalpha(letter) || letter == ' ') words += static_cast<char>(letter);
  }
  return words;
}

uint64_t run_file(const std::string& path) {
  std::ifstream lines(path);
  std::string name;
  uint64_t seed = 0;
  uint64_t count = 0;
  for (; lines >> name >> seed; ++count) run(name, kTargets.at(name), seed);
  return count;
}

uint64_t run_for(double seconds, uint64_t seed) {
  auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  uint64_t count = 0;
  while (std::chrono::steady_clock::now() < end) {
    for (const auto& [name, target] : kTargets) run(name, target, seed);
    ++seed;
    count += kTargets.size();
  }
  return count;
}

void write_corpus(const std::string& path, uint64_t seed) {
  std::ofstream lines(path);
  for (const auto& [name, target] : kTargets) {
    std::set<std::string> seen;
    for (uint64_t i = 0; i < kSeedsOfCorpus; ++i) {
      if (seen.insert(words_of(run(name, target, seed + i))).second) {
        lines << name << ' ' << seed + i << '\n';
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  llmdd::test::on_failure = say_what_failed;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_set_death_callback(say_what_failed);
#endif
  double seconds = argc > 2 ? std::atof(argv[2]) : 10;
  uint64_t first_seed = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1;
  if (argc > 2 && seconds == 0) {
    write_corpus(argv[1], first_seed);
    return 0;
  }
  uint64_t kept = run_file(argv[1]);
  if (kept == 0) {
    std::fprintf(stderr, "no seeds in %s\n", argv[1]);
    return 2;
  }
  uint64_t tried = run_for(seconds, first_seed);
  std::fprintf(stderr, "mutations: %llu kept seeds, %llu new ones from seed %llu\n",
               static_cast<unsigned long long>(kept), static_cast<unsigned long long>(tried),
               static_cast<unsigned long long>(first_seed));
  return 0;
}
