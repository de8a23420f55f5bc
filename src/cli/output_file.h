// Files that commands write.
#pragma once

#include <string>
#include <string_view>

namespace tenon::cli {

// All of the bytes or an Error. An old file keeps its content until the new one is complete.
// `option` is what asked for it, for messages.
void write_file(std::string_view option, const std::string& path, std::string_view bytes);

// Refuses an output that is the input: the same file by another path or a link too.
void require_other_file(std::string_view option, const std::string& output,
                        const std::string& input);

}  // namespace tenon::cli
