// Colours for code: comments, strings, numbers and keywords of common languages.

const words = (text) => new Set(text.split(" "));
const C_LIKE = { line: "//", block: ["/*", "*/"], quotes: "\"'" };
const HASH = { line: "#", quotes: "\"'" };
const C = words(
  "auto bool break case char const continue default do double else enum extern false float for goto if " +
    "include define ifdef ifndef endif inline int long nullptr NULL register return short signed sizeof " +
    "static struct switch true typedef union unsigned void volatile while class namespace template " +
    "typename using public private protected virtual override new delete this throw try catch constexpr " +
    "auto operator friend explicit noexcept co_await co_return",
);
const SCRIPT = words(
  "async await break case catch class const continue debugger default delete do else export extends false " +
    "finally for from function get if import in instanceof let new null of return set static super switch " +
    "this throw true try typeof undefined var void while with yield interface type enum implements " +
    "declare readonly namespace private public protected abstract as keyof never unknown any string number boolean",
);
const JVM = words(
  "abstract as base bool boolean break by byte case catch char class companion const continue data decimal default " +
    "delegate do double else enum event extends extension false final finally fixed float for foreach fun func " +
    "get guard if implements implicit import in init inner instanceof int interface internal is lambda let lock " +
    "long mut mutable namespace native new nil null object open operator out override package params private " +
    "protected protocol public readonly record ref return sealed self set short static string struct suspend super " +
    "switch synchronized this throw throws true try typealias typeof uint unsafe using val var virtual void " +
    "volatile when where while yield async await defer def trait with match",
);
const LANGUAGES = {
  python: {
    ...HASH,
    triple: true,
    keywords: words(
      "False None True and as assert async await break case class continue def del elif else except " +
        "finally for from global if import in is lambda match nonlocal not or pass raise return self try " +
        "while with yield",
    ),
  },
  javascript: { ...C_LIKE, quotes: "\"'`", keywords: SCRIPT },
  json: { quotes: '"', keywords: words("true false null") },
  c: { ...C_LIKE, keywords: C },
  java: { ...C_LIKE, triple: true, keywords: JVM },
  go: {
    ...C_LIKE,
    quotes: "\"'`",
    keywords: words(
      "break case chan const continue default defer else fallthrough false for func go goto if import " +
        "interface iota map nil package range return select struct switch true type var string int bool " +
        "byte rune error float64 int64 any",
    ),
  },
  rust: {
    ...C_LIKE,
    quotes: '"',
    keywords: words(
      "as async await break const continue crate dyn else enum extern false fn for if impl in let loop " +
        "match mod move mut pub ref return self Self static struct super trait true type unsafe use where " +
        "while bool char f32 f64 i32 i64 str String u8 u32 u64 usize Vec Option Some None Result Ok Err",
    ),
  },
  shell: {
    ...HASH,
    spaced: true,
    keywords: words(
      "if then else elif fi for while until do done case esac in function return local export set unset " +
        "echo cd exit source alias read shift trap eval exec sudo",
    ),
  },
  yaml: { ...HASH, spaced: true, keywords: words("true false null yes no on off") },
  toml: { ...HASH, triple: true, keywords: words("true false") },
  ruby: {
    ...HASH,
    keywords: words(
      "alias and begin break case class def do else elsif end ensure false for if in module next nil not " +
        "or redo rescue retry return self super then true undef unless until when while yield require attr_accessor",
    ),
  },
  sql: {
    line: "--",
    block: ["/*", "*/"],
    quotes: "'\"",
    folds: true,
    keywords: words(
      "select from where and or not null is in like between join left right inner outer full cross on as " +
        "group by order having limit offset union all distinct insert into values update set delete create " +
        "table view index drop alter add column primary key foreign references default check unique case when " +
        "then else end exists with recursive over partition asc desc true false begin commit rollback",
    ),
  },
  lua: {
    line: "--",
    block: ["--[[", "]]"],
    quotes: "\"'",
    keywords: words(
      "and break do else elseif end false for function goto if in local nil not or repeat return then true until while",
    ),
  },
  css: { block: ["/*", "*/"], quotes: "\"'", keywords: words("important media import supports keyframes") },
  markup: { block: ["<!--", "-->"], quotes: "\"'", tags: true, keywords: new Set() },
  diff: { lines: true },
};
const NAMES = {
  python: "py python3 pycon",
  javascript: "js jsx ts tsx typescript mjs node",
  json: "json5 jsonc jsonl",
  c: "cpp c++ h hpp cc cuda glsl objc arduino",
  java: "kotlin kt cs csharp c# swift scala dart groovy php",
  go: "golang",
  rust: "rs",
  shell: "sh bash zsh console fish dockerfile make makefile",
  yaml: "yml",
  toml: "ini conf cfg",
  ruby: "rb",
  sql: "sqlite mysql postgresql psql",
  lua: "",
  css: "scss less",
  markup: "html xml svg vue xhtml",
  diff: "patch",
};
const BY_NAME = new Map(
  Object.entries(NAMES).flatMap(([name, more]) => `${name} ${more}`.trim().split(" ").map((each) => [each, LANGUAGES[name]])),
);
const LONGEST = 50_000; // characters; longer code stays plain
const patterns = new Map(); // by language, once used

/** The pieces of code: [text, kind], the kind of plain text being null. */
export function highlighted(code, language) {
  const rules = BY_NAME.get(language.toLowerCase());
  if (!rules || code.length > LONGEST) return [[code, null]];
  if (rules.lines) return code.split(/(?<=\n)/).map((line) => [line, changed(line)]);
  if (!patterns.has(rules)) patterns.set(rules, pattern(rules));
  const found = [];
  let last = 0;
  for (const match of code.matchAll(patterns.get(rules))) {
    const kind = kindOf(match, rules);
    if (kind === null) continue;
    if (match.index > last) found.push([code.slice(last, match.index), null]);
    found.push([match[0], kind]);
    last = match.index + match[0].length;
  }
  if (last < code.length) found.push([code.slice(last), null]);
  return found;
}

const changed = (line) => ({ "+": "string", "-": "keyword", "@": "comment" })[line[0]] ?? null;

function kindOf({ groups }, rules) {
  for (const kind of ["comment", "string", "number", "tag"]) {
    if (groups[kind] !== undefined) return kind === "tag" ? "keyword" : kind;
  }
  const word = rules.folds ? groups.word.toLowerCase() : groups.word;
  return rules.keywords.has(word) ? "keyword" : null;
}

const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\/-]/g, "\\$&");

function pattern({ line, block, quotes, triple, spaced, tags }) {
  const comments = [];
  if (block) comments.push(`${escaped(block[0])}[^]*?(?:${escaped(block[1])}|$)`);
  if (line) comments.push(`${spaced ? "(?<![^\\s;])" : ""}${escaped(line)}[^\\n]*`);
  const strings = triple ? ['"""[^]*?(?:"""|$)', "'''[^]*?(?:'''|$)"] : [];
  for (const quote of quotes) {
    const within = quote === "`" ? "" : "\\n";
    strings.push(`${quote}(?:\\\\[^]|[^${quote}\\\\${within}])*${quote}?`);
  }
  const parts = [
    `(?<comment>${comments.join("|") || "(?!)"})`,
    `(?<string>${strings.join("|")})`,
    `(?<tag>${tags ? "</?[A-Za-z][\\w:.-]*|/?>" : "(?!)"})`,
    "(?<number>\\b(?:0[xX][\\da-fA-F_]+|0[bB][01_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b)",
    "(?<word>[A-Za-z_$][\\w$]*)",
  ];
  return new RegExp(parts.join("|"), "g");
}
