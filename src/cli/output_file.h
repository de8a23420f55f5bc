// Writes the output files of commands.
#pragma once

#include <string>
#include <string_view>

namespace tenon::cli {

// Writes all bytes or throws an Error. An old file keeps its content until the new file is
// complete. `option` names the command line option in messages.
void write_file(std::string_view option, const std::string& path, std::string_view bytes);

// Throws if the output is the input file, also through another path or a link.
void require_other_file(std::string_view option, const std::string& output,
                        const std::string& input);

}  // namespace tenon::cli
