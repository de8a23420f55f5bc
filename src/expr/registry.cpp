// The registry: built-in activations and definitions of users at run time.
#include "expr/registry.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <map>
#include <mutex>

#include "core/fp_mode.h"
#include "core/lock.h"
#include "core/memo.h"
#include "core/text.h"
#include "expr/nearest.h"
#include "expr/order.h"
#include "expr/parse.h"
#include "tenon/error.h"

namespace tenon {

namespace {

constexpr size_t kMostDefinitions = 1 << 16;  // each takes up to some ten kilobytes

// Definitions of users, guarded by library_lock(). A definition lasts as long as the process,
// because texts may refer to it by its contents.
struct Users {
  using Definitions = std::map<uint64_t, Activation>;  // by hash of the contents
  using Definition = Definitions::value_type;
  struct Name {
    Definitions definitions;
    uint64_t current = 0;
  };
  std::map<std::string, Name, std::less<>> names;
  std::map<std::string, std::string, std::less<>> aliases;  // alias to name
  std::vector<std::string> order;                           // in order of the first definition
  size_t count = 0;
  std::atomic<uint64_t> changes = 0;  // every call by text reads it without the lock

  [[nodiscard]] const Name* find(std::string_view name) const {
    const auto alias = aliases.find(name);
    const auto it = names.find(alias == aliases.end() ? name : std::string_view(alias->second));
    return it == names.end() ? nullptr : &it->second;
  }
  // Finds the current definition of `name`, or the definition `name@contents`.
  [[nodiscard]] const Definition* definition(std::string_view name) const {
    const size_t at = name.find('@');
    const Name* const found = find(name.substr(0, at));
    if (!found) return nullptr;
    uint64_t contents = found->current;
    if (at != std::string_view::npos) {
      const char* const end = name.data() + name.size();
      if (std::from_chars(name.data() + at + 1, end, contents, 16).ptr != end) return nullptr;
    }
    const auto it = found->definitions.find(contents);
    return it == found->definitions.end() ? nullptr : &*it;
  }
};
Users& users() {
  static auto& all = *new Users;  // never destroyed: threads may outlive static objects
  return all;
}

// Resolved texts, so that calls by text share one formula.
Memo<Activation>& resolved() {
  static auto& texts = *new Memo<Activation>(1024);
  return texts;
}

// A hash of everything that affects the result of an activation.
class Contents {
 public:
  Contents& add(uint64_t value) {
    for (int i = 0; i < 8; ++i, value >>= 8) hash_ = (hash_ ^ (value & 255)) * 0x100000001b3ULL;
    return *this;
  }
  Contents& add(float value) { return add(uint64_t{__builtin_bit_cast(uint32_t, value)}); }
  Contents& add(std::string_view text) {
    for (const char c : text) add(uint64_t{static_cast<unsigned char>(c)});
    return add(text.size());
  }
  Contents& add(const Graph& graph, uint32_t root) {
    std::vector<uint64_t> number(graph.size());
    uint64_t count = 0;
    for (const uint32_t id : order(graph, std::span(&root, 1))) {
      const Node& n = graph[id];
      add(static_cast<uint64_t>(n.word)).add(uint64_t{n.detail}).add(n.value);
      add(uint64_t{n.slot});
      for (int i = 0; i < n.arity(); ++i) add(number[n.in[i]]);
      number[id] = count++;
    }
    return *this;
  }
  [[nodiscard]] uint64_t hash() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325ULL;  // FNV-1a
};

bool answers_to(const Activation& f, std::string_view name) {
  return f.name == name || std::ranges::find(f.aliases, name) != f.aliases.end();
}

const Activation* find(std::span<const Activation> list, std::string_view name) {
  const auto it = std::ranges::find_if(list, [&](const auto& f) { return answers_to(f, name); });
  return it == list.end() ? nullptr : &*it;
}

// `text` = "gated(inner)": the inner part, if the parenthesis after the name closes at the end.
std::optional<std::string_view> inside(std::string_view text, std::string_view outer) {
  if (!text.starts_with(outer)) return std::nullopt;
  text.remove_prefix(outer.size());
  if (!text.starts_with('(') || !text.ends_with(')')) return std::nullopt;
  int depth = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    depth += text[i] == '(' ? 1 : text[i] == ')' ? -1 : 0;
    if (depth == 0 && i + 1 < text.size()) return std::nullopt;
  }
  return text.substr(1, text.size() - 2);
}

constexpr std::string_view kSpaces = " \t\r\n";
std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(kSpaces);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpaces) - first + 1);
}

// Binds names in the text at once: a later definition does not change earlier ones.
Activation from_formula(const std::string& name, std::string_view text) {
  static const auto& kInputs = *new std::vector<std::string>{"x", "a", "b"};
  const Formula formula = parse(text, kInputs);
  const bool unary = !formula.used[1] && !formula.used[2];
  require(unary || !formula.used[0], "activation '", name,
          "': the formula mixes x with a or b; a unary one uses x, a gated one a and b");
  return {.name = name,
          .inputs = unary ? 1 : 2,
          .parameters = formula.parameters,
          .body =
              [formula](const Args& in) {
                std::vector<Expr> loads{in.x, in.a, in.b};
                loads.insert(loads.end(), in.values.begin(), in.values.end());
                return substitute(formula, loads);
              },
          .aliases = {}};
}

void set_parameters(Activation& f, std::span<const std::pair<std::string, float>> given) {
  for (const auto& [name, value] : given) {
    const auto p = std::ranges::find(f.parameters, name, &Parameter::name);
    if (p == f.parameters.end()) {
      std::string known;
      for (const Parameter& q : f.parameters) known += str(known.empty() ? "" : ", ", q.name);
      fail(Code::invalid_argument, f.name, ": no parameter '", name, "'; it has ",
           known.empty() ? "none" : known);
    }
    require(value >= p->least && value <= p->most, f.name, ": ", name, " = ", value,
            " is outside [", p->least, ", ", p->most, "]; give a value inside");
    p->value = value;
  }
}

// The parts of `name(parameter=number, …)`. Empty if the text does not have this form.
struct WithParameters {
  std::string_view name;
  std::vector<std::pair<std::string, float>> values;
};
std::optional<WithParameters> with_parameters(std::string_view text) {
  const size_t open = text.find('(');
  if (open == std::string_view::npos || !text.ends_with(')')) return std::nullopt;
  WithParameters result{trimmed(text.substr(0, open)), {}};
  if (pin_end(result.name, name_end(result.name, 0)) != result.name.size()) return std::nullopt;
  std::string_view rest = text.substr(open + 1, text.size() - open - 2);
  while (true) {
    const size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view item = rest.substr(0, comma);
    const size_t equals = item.find('=');
    if (equals == std::string_view::npos || item.substr(equals + 1).starts_with('='))
      return std::nullopt;  // it is a formula
    const std::string name(trimmed(item.substr(0, equals)));
    if (!is_identifier(name)) return std::nullopt;
    std::string_view number = trimmed(item.substr(equals + 1));
    if (number.starts_with('+')) number.remove_prefix(1);
    float value = 0;
    const auto read = std::from_chars(number.data(), number.data() + number.size(), value);
    require(read.ec == std::errc() && read.ptr == number.data() + number.size(), result.name, ": ",
            name, " = ", number, " is not a number that fp32 holds");
    for (const auto& [other, _] : result.values)
      require(other != name, result.name, ": ", name, " is given twice; give it once");
    result.values.emplace_back(name, value);
    if (comma == rest.size()) return result;
    rest.remove_prefix(comma + 1);
  }
}

Activation resolve(std::string_view text) {
  text = trimmed(text);
  check_bytes("activation", text);
  require(!text.empty(), "activation: the name or formula is empty; `tenon list` prints the names");
  if (const auto inner = inside(text, "gated")) return gated(resolve(*inner));
  if (const auto inner = inside(text, "scaled")) return scaled(resolve(*inner));
  if (auto f = registered(text)) return *f;
  if (const auto parts = with_parameters(text)) {
    Activation f = resolve(parts->name);
    set_parameters(f, parts->values);
    return f;
  }
  check_pin(text);
  // A single identifier that is not an input is meant as a name.
  if (is_identifier(text) && text != "x" && text != "a" && text != "b")
    fail(Code::invalid_argument, "activation '", text, "' is not known", suggestion(text),
         "; `tenon list` prints the names, or write a formula of x, or of a and b");
  return from_formula(formula_label(text), text);
}

}  // namespace

Expr Args::operator[](std::string_view parameter) const {
  for (size_t i = 0; i < parameters.size(); ++i)
    if (parameters[i].name == parameter) return values[i];
  fail(Code::invalid_argument, "activation: its function asks for '", parameter,
       "', which is not one of its parameters; add it to the list");
}

std::optional<Activation> registered(std::string_view name) {
  if (const Activation* f = find(built_in_activations(), name)) return *f;
  const std::lock_guard guard(library_lock());
  const Users::Definition* const d = users().definition(name);
  return d ? std::optional(d->second) : std::nullopt;
}

void check_pin(std::string_view name) {
  const size_t at = name_end(name, 0);
  if (at == 0 || at == name.size() || pin_end(name, at) != name.size()) return;
  require(registered(name).has_value(), "activation '", name,
          "': nothing of these contents was defined as '", name.substr(0, at),
          "' in this process; define it with the formula that it had");
}

uint64_t definitions() { return users().changes; }

std::string pinned(std::string_view text) {
  text = trimmed(text);
  std::string_view core = text;
  while (true) {
    auto inner = inside(core, "gated");
    if (!inner) inner = inside(core, "scaled");
    if (!inner) break;
    core = trimmed(*inner);
  }
  std::string out;
  const std::lock_guard guard(library_lock());
  for (size_t i = 0; i < text.size();) {
    const size_t start = i;
    i = name_end(text, start);
    if (i == start) {
      out += text[i++];
      continue;
    }
    const std::string_view name = text.substr(start, i - start);
    i = pin_end(text, i);
    out += text.substr(start, i - start);
    if (!is_identifier(name) || i > start + name.size()) continue;
    // A name is an activation if it is called or is the whole text. Elsewhere it is an input or a
    // parameter.
    const size_t next = std::min(text.find_first_not_of(kSpaces, i), text.size());
    const bool called = next < text.size() && text[next] == '(';
    const bool whole = name.data() == core.data() && name.size() == core.size();
    if (!called && !whole) continue;
    if (find(built_in_activations(), name)) continue;
    if (const Users::Definition* const d = users().definition(name)) {
      std::array<char, 16> digits;
      char* const end = std::to_chars(digits.begin(), digits.end(), d->first, 16).ptr;
      out.replace(out.size() - name.size(), name.size(), d->second.name);
      out.append("@").append(digits.begin(), end);
    }
  }
  return out;
}

std::string suggestion(std::string_view name) {
  Nearest nearest(name);
  for (const std::string& candidate : activation_names()) nearest.offer(candidate);
  for (const WordInfo& w : kWords)
    if (is_reserved(w.name)) nearest.offer(w.name);
  return nearest.text();
}

std::vector<std::string> activation_names() {
  std::vector<std::string> names;
  for (const Activation& f : built_in_activations()) names.push_back(f.name);
  const std::lock_guard guard(library_lock());
  names.insert(names.end(), users().order.begin(), users().order.end());
  return names;
}

Activation activation(std::string_view text,
                      std::span<const std::pair<std::string, float>> parameters) {
  text = trimmed(text);
  const uint64_t meaning = definitions();
  std::optional<Activation> known = resolved().find(text, meaning);
  if (known && parameters.empty()) return *std::move(known);
  const FpMode ieee;
  Activation f = resolved().keep(text, known ? *known : resolve(text), meaning);
  set_parameters(f, parameters);
  return f;
}

Activation gated(const Activation& f) {
  require(f.inputs == 1 && !f.scaled, "gated(", f.name, "): ", f.name,
          " is not unary; gated(f) = ", "f(a)·b needs a formula of x alone");
  Activation g = f;
  g.name = str("gated(", f.name, ")");
  g.aliases.clear();
  g.inputs = 2;
  g.body = [f](const Args& in) {
    const Expr half = in.a;
    return call(f, std::span(&half, 1), in.values) * in.b;
  };
  return g;
}

Activation scaled(const Activation& f) {
  require(!f.scaled, "scaled(", f.name, "): it is scaled already; leave the outer scaled(…) out");
  Activation s = f;
  s.name = str("scaled(", f.name, ")");
  s.aliases.clear();
  s.scaled = true;
  return s;
}

void define(const std::string& name, std::string_view formula) {
  define(from_formula(name, formula));
}

namespace {

// Names and aliases follow the same rules.
void check_name(const std::string& name, std::string_view owner) {
  require(name.size() <= kMaxNameBytes, "define: a name of ", name.size(), " bytes; at most ",
          kMaxNameBytes, " are taken");
  require(is_identifier(name), "define: '", name,
          "' is not a name; use letters, digits and _, not starting with a digit");
  require(!is_reserved(name) && name != "x" && name != "a" && name != "b", "define: '", name,
          "' is a word of the formula language; choose another name");
  require(!find(built_in_activations(), name), "define: '", name,
          "' is built in and cannot be replaced; choose another name");
  for (const std::string_view prefix : {"bias_", "bgrad_d", "d"})
    if (name.starts_with(prefix))
      require(!find(built_in_activations(), std::string_view(name).substr(prefix.size())),
              "define: '", name, "' is a named function of a built-in activation; ",
              "choose another name");
  const std::lock_guard guard(library_lock());
  if (const Users::Name* const other = users().find(name)) {
    const std::string& means = other->definitions.at(other->current).name;
    require(means == owner, "define '", owner, "': '", name, "' already means '", means,
            "'; choose another name");
  }
}

}  // namespace

void define(Activation f) {
  const FpMode ieee;
  check_name(f.name, f.name);
  for (const std::string& alias : f.aliases) check_name(alias, f.name);
  require(f.inputs == 1 || f.inputs == 2, "define '", f.name, "': ", f.inputs,
          " inputs; an activation has 1 (x) or 2 (a and b)");
  require(static_cast<bool>(f.body), "define '", f.name, "': no function given");
  for (size_t i = 0; i < f.parameters.size(); ++i)
    require(is_identifier(f.parameters[i].name) && f.parameters[i].name.size() <= kMaxNameBytes &&
                std::ranges::count(f.parameters, f.parameters[i].name, &Parameter::name) == 1,
            "define '", f.name, "': '", f.parameters[i].name,
            "' cannot name a parameter; names are identifiers, each given once");
  for (const Parameter& p : f.parameters)
    require(p.value >= p.least && p.value <= p.most, "define '", f.name, "': the default ", p.name,
            " = ", p.value, " is outside [", p.least, ", ", p.most, "]; give a value inside");
  // A trial build reports errors now instead of at the first call.
  Graph graph;
  std::vector<Expr> inputs, parameters;
  uint32_t slot = 0;
  for (int i = 0; i < f.inputs; ++i) inputs.push_back(graph.load(slot++));
  for (size_t i = 0; i < f.parameters.size(); ++i) parameters.push_back(graph.load(slot++));
  const uint32_t root = graph.id(call(f, inputs, parameters));
  Contents contents;
  contents.add(static_cast<uint64_t>(f.inputs)).add(uint64_t{f.scaled}).add(graph, root);
  for (const Parameter& p : f.parameters)
    contents.add(p.name).add(p.value).add(p.least).add(p.most);

  const std::lock_guard guard(library_lock());
  Users& all = users();
  require(all.count < kMostDefinitions, "define '", f.name, "': ", all.count,
          " definitions, the most that a process may make; use parameters for what varies");
  std::erase_if(all.aliases, [&](const auto& alias) { return alias.second == f.name; });
  for (const std::string& alias : f.aliases) all.aliases.emplace(alias, f.name);
  Users::Name& name = all.names[f.name];
  if (name.definitions.empty()) all.order.push_back(f.name);
  name.current = contents.hash();
  if (name.definitions.try_emplace(name.current, f).second) ++all.count;
  ++all.changes;
}

Expr call(const Activation& f, std::span<const Expr> inputs, std::span<const Expr> parameters) {
  require(parameters.size() == f.parameters.size(), f.name, ": ", parameters.size(),
          " parameter values given, it has ", f.parameters.size());
  const Args args{.x = inputs[0],
                  .a = inputs[0],
                  .b = inputs.size() > 1 ? inputs[1] : inputs[0],
                  .parameters = f.parameters,
                  .values = parameters};
  return f.body(args);
}

}  // namespace tenon
