// World: the nodes of one run, the links between them, and the scheduler that lets one thing happen at a time.
//
// A run has a wild part, in which prompts come and everything that may go wrong does, and a calm one, in which all that
// was begun must come to its end. Every shape, size and probability comes from the seed.
#pragma once

#include <memory>
#include <vector>

#include "decoder.h"
#include "prefiller.h"

namespace sim {

class World {
  public:
    explicit World(Run& run);
    ~World();
    void play();

  private:
    struct Host {
        bool decodes = false;
        uint32_t number = 0;
        uint32_t num_nics = 1;
        pdd::WindowSize window;
        uint32_t num_pages = 0;
        std::unique_ptr<Node> node;
        std::unique_ptr<Decoder> decoder;
        std::unique_ptr<Prefiller> prefiller;
        uint64_t epoch = 0;
        Message stale;  // a request of a former life
    };
    Surroundings surroundings() { return {run_, *network_, witness_, ledger_, gpu_}; }

    void choose_shapes();
    void choose_faults();
    void note_setting();  // the first lines of the history
    void give_birth(Host& host);
    void wild_step();
    void go_wrong();
    void check();
    void calm_down();
    std::string unfinished() const;
    void sweep();
    void end();

    Host& any(bool decodes);
    Link* link_of(Host& decoder, Host& prefiller, bool dial);
    void new_prompt();
    void deliver(const Host* but = nullptr);
    void die(Host& host);
    void cut(Link& link);
    void meanwhile(const Host& busy);
    void carry(uint64_t times);
    void turn(Host& host);
    void hear(Host& host);

    Run& run_;
    Ledger ledger_;
    Witness witness_;
    SimGpu gpu_;
    std::unique_ptr<Network> network_;
    KvMemory memory_ = KvMemory::Host;
    uint32_t layers_ = 1;
    uint32_t page_bytes_ = 16;
    Units units_;
    std::vector<std::unique_ptr<Node>> dead_;  // whose shared memory others still map
    std::vector<Host> hosts_;
    std::vector<std::unique_ptr<Link>> links_;
    uint32_t last_life_ = 0;
    uint64_t last_prompt_ = 0;
    uint64_t most_pages_ = 1;
    uint32_t arms_late_ = 0;
    // in ten thousand, per step
    uint32_t cancels_ = 0;
    uint32_t cuts_ = 0;
    uint32_t deaths_ = 0;
    uint32_t pauses_ = 0;
    uint32_t replays_ = 0;
    uint32_t overtakes_ = 0;
    uint32_t impatience_ = 0;
    uint32_t overtaken_ = 0;  // per copy between processes
    uint32_t hangups_ = 0;    // of these
    bool in_a_copy_ = false;
    pdd::TimePoint now_{std::chrono::hours(1)};
};

}  // namespace sim
