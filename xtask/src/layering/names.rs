//! The names that a file declares and uses, read from its tokens without a parser.

use std::collections::BTreeMap;

use crate::lint::lexer::{TokenKind, tokens};

/// Keywords that begin an item, which ends with its body or a semicolon.
const ITEMS: [&str; 13] = [
    "fn", "struct", "enum", "union", "trait", "type", "const", "static", "mod", "impl", "use", "unsafe",
    "extern",
];

/// A path as it is written: `super::b::X`.
pub(super) type Path = Vec<String>;

/// Path that `use` binds to a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Import {
    pub(super) path: Path,
    /// It has a visibility: other files may reach the item through this one.
    pub(super) re_exported: bool,
}

/// Names of one file, without its tests.
#[derive(Debug, Default)]
pub(super) struct Names {
    pub(super) imports: BTreeMap<String, Import>,
    /// Imports of all names of a module, and those that bind none (`use X as _`).
    pub(super) unnamed: Vec<Path>,
    /// Paths in its code, outside of `use`.
    pub(super) paths: Vec<Path>,
    /// Modules that are declared for tests only.
    pub(super) test_modules: Vec<String>,
}

pub(super) fn names_of(source: &str) -> Names {
    let words = words(source);
    let mut names = Names::default();
    let words = without_tests(&words, &mut names.test_modules);
    let mut at = 0;
    while at < words.len() {
        let before = at.checked_sub(1).map_or("", |before| words[before]);
        let next = words.get(at + 1).copied().unwrap_or_default();
        if words[at] == "use" && next != "<" {
            let end = at + words[at..].iter().position(|word| *word == ";").unwrap_or(words.len() - at);
            let re_exported = before == "pub" || before == ")" && is_visibility(&words[..at]);
            read_tree(&[], &words[at + 1..end], re_exported, &mut names);
            at = end;
        } else if is_identifier(words[at]) && before != "." {
            let mut path = vec![words[at].to_owned()];
            while words.get(at + 1) == Some(&"::")
                && words.get(at + 2).is_some_and(|word| is_identifier(word))
            {
                path.push(words[at + 2].to_owned());
                at += 2;
            }
            names.paths.push(path);
        }
        at += 1;
    }
    names
}

/// Splits code into identifiers, `::` and single characters. Comments, literals and lifetimes are left out.
fn words(source: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = 0;
    let mut skipped_to = 0;
    for (kind, text) in tokens(source) {
        let start = rest;
        rest += text.len();
        if kind != TokenKind::Code || start < skipped_to || text.trim().is_empty() {
            continue;
        }
        let code = &source[start..];
        let of_name =
            |from: usize| code[from..].find(|c: char| !is_of_name(c)).map_or(code.len(), |at| from + at);
        let length = match text {
            "'" => of_name(1),
            ":" if code.starts_with("::") => 2,
            _ => of_name(0).max(text.len()),
        };
        skipped_to = start + length;
        if text != "'" {
            words.push(&code[..length]);
        }
    }
    words
}

fn is_of_name(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

fn is_identifier(word: &str) -> bool {
    word.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Returns true if `words` end with `pub(…)`.
fn is_visibility(words: &[&str]) -> bool {
    words.iter().rposition(|word| *word == "(").is_some_and(|open| open > 0 && words[open - 1] == "pub")
}

/// Removes the items, fields and expressions that are compiled for tests only.
fn without_tests<'a>(words: &[&'a str], modules: &mut Vec<String>) -> Vec<&'a str> {
    const MARK: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];
    const MARK_OF_SEVERAL: [&str; 7] = ["#", "[", "cfg", "(", "all", "(", "test"];
    let mut kept = Vec::new();
    let mut at = 0;
    while at < words.len() {
        let rest = &words[at..];
        if rest.starts_with(&MARK) || rest.starts_with(&MARK_OF_SEVERAL) {
            let length = length_of_item(rest);
            if let Some(module) = rest[..length].windows(3).find(|three| three[0] == "mod" && three[2] == ";")
            {
                modules.push(module[1].to_owned());
            }
            at += length;
        } else {
            kept.push(words[at]);
            at += 1;
        }
    }
    kept
}

/// Number of words of the item, field or expression at the beginning, with its attributes.
fn length_of_item(words: &[&str]) -> usize {
    let mut at = 0;
    while words.get(at) == Some(&"#") {
        at = end_of_group(words, at + 1);
    }
    let first =
        words[at..].iter().find(|word| is_identifier(word) && !matches!(**word, "pub" | "crate" | "super"));
    let is_item = first.is_some_and(|word| ITEMS.contains(word));
    let is_use = first == Some(&"use");
    while at < words.len() {
        match words[at] {
            "(" | "[" => at = end_of_group(words, at),
            "{" => {
                at = end_of_group(words, at);
                if is_item && !is_use {
                    return at;
                }
            }
            ")" | "]" | "}" => return at,
            ";" => return at + 1,
            "," if !is_item => return at + 1,
            _ => at += 1,
        }
    }
    at
}

/// Index behind the group of brackets that begins at `open`.
fn end_of_group(words: &[&str], open: usize) -> usize {
    let mut depth = 0_usize;
    for (at, word) in words.iter().enumerate().skip(open) {
        match *word {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => {
                depth -= 1;
                if depth == 0 {
                    return at + 1;
                }
            }
            _ => {}
        }
    }
    words.len()
}

/// Reads the branches of a use tree.
fn read_tree(before: &[String], tree: &[&str], re_exported: bool, names: &mut Names) {
    let mut path = before.to_vec();
    let mut at = 0;
    while at < tree.len() {
        match tree[at] {
            "{" => {
                let end = end_of_group(tree, at);
                let mut start = at + 1;
                let mut comma = start;
                while comma < end {
                    match tree[comma] {
                        "{" => comma = end_of_group(tree, comma),
                        "," => {
                            read_tree(&path, &tree[start..comma], re_exported, names);
                            comma += 1;
                            start = comma;
                        }
                        _ => comma += 1,
                    }
                }
                return read_tree(&path, &tree[start..end - 1], re_exported, names);
            }
            "*" => return names.unnamed.push(path),
            "as" => {
                match tree[at + 1] {
                    "_" => names.unnamed.push(path),
                    name => bind(name, path, re_exported, names),
                }
                return;
            }
            "self" if !path.is_empty() => {}
            "::" => {}
            name => path.push(name.to_owned()),
        }
        at += 1;
    }
    if let Some(name) =
        path.last().filter(|_| path.len() > before.len() || !before.is_empty() && !tree.is_empty())
    {
        bind(&name.clone(), path, re_exported, names);
    }
}

fn bind(name: &str, path: Path, re_exported: bool, names: &mut Names) {
    names.imports.insert(name.to_owned(), Import { path, re_exported });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> Path {
        text.split("::").map(str::to_owned).collect()
    }

    #[test]
    fn a_use_tree_binds_the_name_of_each_branch() {
        let names =
            names_of("use super::{a::{self, X}, b::Y as Z};\npub(crate) use c::{W,};\nuse d::T as _;");
        let bound: Vec<_> = names
            .imports
            .iter()
            .map(|(name, import)| (name.as_str(), import.path.join("::"), import.re_exported))
            .collect();
        let wanted = [
            ("W", "c::W", true),
            ("X", "super::a::X", false),
            ("Z", "super::b::Y", false),
            ("a", "super::a", false),
        ];
        assert_eq!(bound, wanted.map(|(name, path, re_exported)| (name, path.to_owned(), re_exported)));
        assert_eq!(names.unnamed, [path("d::T")]);
    }

    #[test]
    fn paths_of_code_are_read_without_comments_literals_methods_and_lifetimes() {
        let names = names_of("// a::B\nfn f<'c>() { \"d::E\"; g.h(); super::i::J::<K>::l(); }");
        assert_eq!(
            names.paths,
            [path("fn"), path("f"), path("g"), path("super::i::J"), path("K"), path("l")]
        );
    }

    #[test]
    fn code_of_tests_is_left_out() {
        let source = "#[cfg(test)]\nmod checks;\nstruct S {\n    #[cfg(test)]\n    a: A<(), ()>,\n    b: B,\n}\n\
            #[cfg(test)]\n#[allow(x)]\nimpl C { fn d() -> [u8; 2] {} }\n#[cfg(test)]\nmod tests { E }\nF";
        let names = names_of(source);
        assert_eq!(names.test_modules, ["checks"]);
        let all: Vec<_> = names.paths.iter().flatten().map(String::as_str).collect();
        assert_eq!(all, ["struct", "S", "b", "B", "F"]);
    }
}
