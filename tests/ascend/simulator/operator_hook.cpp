#include "operator_hook.h"

#include <cstring>
#include <memory>
#include <vector>

#include "call.h"
#include "copy.h"

namespace {

// Memory in several pieces is worked on in one buffer.
struct View {
    std::vector<std::byte> buffer;
    std::byte* at = nullptr;

    explicit View(const sim::Side& side) {
        if (side.pieces.size() == 1) {
            at = side.pieces[0].at;
            return;
        }
        for (const sim::Piece& piece : side.pieces) {
            buffer.insert(buffer.end(), piece.at, piece.at + piece.size_bytes);
        }
        at = buffer.data();
    }

    void write_back(sim::Side& side) const {
        size_t done = 0;
        for (sim::Piece& piece : side.pieces) {
            if (!buffer.empty()) {
                std::memcpy(piece.at, buffer.data() + done, piece.size_bytes);
            }
            done += piece.size_bytes;
        }
    }
};

}  // namespace

SIM_API aclError mc2_sim_submit_operator(aclrtStream stream, const mc2_sim_extent* extents,
                                         size_t num,
                                         void (*work)(void* argument, std::byte* const* views),
                                         void (*release)(void* argument), void* argument) {
    const std::shared_ptr<void> owned(argument, release);
    std::shared_ptr<sim::Stream> found;
    SIM_TRY(sim::find_own_stream(stream, "an operator", &found));
    std::vector<sim::Use> uses;
    std::vector<bool> is_written;
    for (size_t i = 0; i < num; ++i) {
        uses.push_back({.pointer = extents[i].pointer,
                        .size_bytes = extents[i].size_bytes,
                        .was_device = true});
        is_written.push_back(extents[i].is_written != 0);
        const std::scoped_lock lock(sim::memory().mutex);
        const auto side = sim::locate(sim::memory(), extents[i].pointer, extents[i].size_bytes);
        if (!side || !side->is_device) {
            return sim::fail(acl::kRtParamInvalid,
                             "a tensor of an operator is not all live device memory");
        }
    }
    const auto run = [work, owned, is_written](std::vector<sim::Side>& sides) {
        std::vector<View> views;
        std::vector<std::byte*> pointers;
        views.reserve(sides.size());
        for (const sim::Side& side : sides) {
            views.emplace_back(side);
            pointers.push_back(views.back().at);
        }
        work(owned.get(), pointers.data());
        for (size_t i = 0; i < sides.size(); ++i) {
            if (is_written[i]) {
                views[i].write_back(sides[i]);
            }
        }
    };
    return sim::submit_work(found, std::move(uses), run, "operator-task");
}
