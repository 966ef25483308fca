// Threads against each other on real engines, for ThreadSanitizer. Without arguments all scenarios
// run, with names only those. Exit status 0: every check held.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "race/scenarios.h"

namespace {

// Nothing here waits for time to pass; a lost wake-up ends in SIGALRM.
constexpr unsigned kDeadlineS = 540;

using Scenario = std::pair<const char*, void (*)()>;

const char* own_program = nullptr;

const std::vector<Scenario> kScenarios = {
    {"links", llmdd::test::links_come_and_go},
    {"layers", llmdd::test::layers_are_sent_while_links_end},
    {"reservations", llmdd::test::closed_reservations_stay_as_they_are},
    {"members", llmdd::test::members_meet_in_both_directions},
    {"engines", llmdd::test::engines_end_during_everything},
    {"caches", llmdd::test::allocated_caches_are_given_back},
    {"shares", llmdd::test::shared_memory_comes_and_goes},
    {"queues", llmdd::test::queued_requests_keep_their_order},
    {"next", llmdd::test::what_comes_next_is_before_all_that_wait},
    {"processes", [] { llmdd::test::processes_talk(own_program); }},
};

bool chosen(const char* name, int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], name) == 0) return true;
  }
  return argc == 1;
}

}  // namespace

int main(int argc, char** argv) {
  ::alarm(kDeadlineS);
  if (argc == 2 && std::strcmp(argv[1], "--peer") == 0) return llmdd::test::run_peer_process();
  own_program = argv[0];
  for (auto [name, run] : kScenarios) {
    if (!chosen(name, argc, argv)) continue;
    auto begin = std::chrono::steady_clock::now();
    run();
    std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::fprintf(stderr, "%s: %.1f s\n", name, took.count());
  }
  return 0;
}
