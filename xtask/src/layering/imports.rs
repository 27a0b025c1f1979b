//! The files of a crate that import each other in a circle, by their `use super::…`, `use self::…`, `use crate::…` and
//! `use child::…`.
//!
//! Imports between a module and one below it are not counted: in idiomatic Rust a parent uses the items of its child, and the
//! child the private types of its parent, so the two are one unit in several files. Tests are left out.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// A module's path from the crate's root.
type Module = Vec<String>;
type Graph = BTreeMap<Module, BTreeSet<Module>>;

/// Names the modules of the crate at `sources` that are in a circle of imports; each circle once.
pub(super) fn circles(sources: &Path) -> Result<Vec<String>> {
    let mut files = BTreeMap::new();
    collect(sources, &mut Vec::new(), &mut files)?;
    remove_tests(&mut files);
    Ok(circles_of(&graph(&files)))
}

/// Removes the modules that are declared for tests only, with those below them.
fn remove_tests(files: &mut BTreeMap<Module, String>) {
    const MARK: &str = "#[cfg(test)]\nmod ";
    let declared = |(module, text): (&Module, &String)| {
        let names = text.split(MARK).skip(1).filter_map(|rest| rest.split_once(';'));
        let names = names.map(|(name, _)| name.trim().to_owned()).filter(|name| name.chars().all(is_of_name));
        names.map(|name| [&module[..], &[name]].concat()).collect::<Vec<_>>()
    };
    let tests: Vec<Module> = files.iter().flat_map(declared).collect();
    files.retain(|module, _| !tests.iter().any(|test| module.starts_with(test)));
}

fn is_of_name(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

/// Every file below `directory` but tests, by its module.
fn collect(directory: &Path, above: &mut Module, files: &mut BTreeMap<Module, String>) -> Result<()> {
    for entry in fs::read_dir(directory).with_context(|| directory.display().to_string())? {
        let path = entry?.path();
        let Some(name) = path.file_stem().and_then(|name| name.to_str()).map(str::to_owned) else { continue };
        if path.is_dir() {
            above.push(name);
            collect(&path, above, files)?;
            above.pop();
        } else if path.extension().is_some_and(|extension| extension == "rs") && name != "tests" {
            let mut module = above.clone();
            if !matches!(name.as_str(), "lib" | "main" | "mod") {
                module.push(name);
            }
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            files.insert(module, text);
        }
    }
    Ok(())
}

fn graph(files: &BTreeMap<Module, String>) -> Graph {
    let used = |(module, text): (&Module, &String)| {
        let is_child = |name: &str| files.contains_key(&[&module[..], &[name.to_owned()]].concat());
        let paths = imports(text, is_child).into_iter();
        let used = paths.filter_map(|path| file_of(module, &path, files));
        let used = used.filter(|used| !used.starts_with(module) && !module.starts_with(used));
        (module.clone(), used.collect())
    };
    files.iter().map(used).collect()
}

/// The file in which what `path` names is declared, or by which it is passed on.
fn file_of(module: &Module, path: &str, files: &BTreeMap<Module, String>) -> Option<Module> {
    let mut at = module.clone();
    let mut names = path.split("::").map(str::trim).peekable();
    match names.next()? {
        "crate" => at.clear(),
        "super" => {
            at.pop();
            while names.next_if_eq(&"super").is_some() {
                at.pop();
            }
        }
        _ => {}
    }
    for name in names {
        at.push(name.to_owned());
        if !files.contains_key(&at) {
            at.pop();
            break;
        }
    }
    files.contains_key(&at).then_some(at)
}

/// The paths within the crate that its `use` declarations name, before the tests within the file.
fn imports(text: &str, is_child: impl Fn(&str) -> bool) -> Vec<String> {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let code: Vec<&str> = code.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
    let mut paths = Vec::new();
    for declaration in code.join(" ").split("use ").skip(1) {
        let tree = declaration.split(';').next().unwrap_or_default().trim();
        let first = tree.split("::").next().unwrap_or_default();
        if ["super", "self", "crate"].contains(&first) || is_child(first) {
            expand("", tree, &mut paths);
        }
    }
    paths
}

/// Writes the branches of a use tree out.
fn expand(before: &str, tree: &str, paths: &mut Vec<String>) {
    let (mut depth, mut start) = (0, 0);
    let ends = tree.char_indices().chain([(tree.len(), ',')]);
    for (at, character) in ends {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let branch = tree[start..at].trim();
                start = at + 1;
                match branch.split_once('{') {
                    Some((path, inner)) => {
                        let inner = inner.strip_suffix('}').unwrap_or(inner);
                        expand(&format!("{before}{path}"), inner, paths);
                    }
                    None if branch.is_empty() => {}
                    None => paths.push(format!("{before}{}", branch.split(" as ").next().unwrap_or(branch))),
                }
            }
            _ => {}
        }
    }
}

fn circles_of(graph: &Graph) -> Vec<String> {
    let reached: BTreeMap<_, _> = graph.keys().map(|module| (module, reach(graph, module))).collect();
    let mut circles = BTreeSet::new();
    for (module, reached_from) in &reached {
        let circle: Vec<String> = reached_from
            .iter()
            .filter(|other| reached.get(other).is_some_and(|back| back.contains(*module)))
            .map(|other| if other.is_empty() { "lib".into() } else { other.join("::") })
            .collect();
        if !circle.is_empty() {
            circles.insert(circle.join(", "));
        }
    }
    circles.into_iter().collect()
}

/// All that is used from there, by however many steps.
fn reach(graph: &Graph, from: &Module) -> BTreeSet<Module> {
    let mut reached = BTreeSet::new();
    let mut left: Vec<&Module> = graph[from].iter().collect();
    while let Some(module) = left.pop() {
        if reached.insert(module.clone()) {
            left.extend(&graph[module]);
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let module =
            |path: &str| path.split("::").filter(|name| !name.is_empty()).map(str::to_owned).collect();
        let mut files = files.iter().map(|(path, text)| (module(path), (*text).to_owned())).collect();
        remove_tests(&mut files);
        circles_of(&graph(&files))
    }

    #[test]
    fn a_circle_is_found_however_long() {
        let files = [
            ("", "mod a; mod b; mod c;"),
            ("a", "use std::fmt;\nuse super::b::{self, X};\n"),
            ("b", "use crate::{\n    c::Y as Z, // passed on\n};\n"),
            ("b::d", "use super::super::a::W;"),
            ("c", "use super::b::d::V;"),
        ];
        assert_eq!(found(&files), ["a, b, b::d, c"]);
    }

    #[test]
    fn an_import_by_the_name_of_a_child_counts() {
        let files = [
            ("", ""),
            ("a", "use b::X;\nuse std::fmt;"),
            ("a::b", "use crate::c::Y;"),
            ("c", "use crate::a::Z;"),
        ];
        assert_eq!(found(&files), Vec::<String>::new());
        let files = [("a", "use b::X;"), ("a::b", "use super::c::Y;"), ("a::c", "use super::b::Z;")];
        assert_eq!(found(&files), ["a::b, a::c"]);
    }

    #[test]
    fn modules_of_tests_are_left_out() {
        let files = [
            ("", "mod a;\n#[cfg(test)]\nmod checks;\n"),
            ("checks::b", "use super::c::X;"),
            ("checks::c", "use super::b::Y;"),
        ];
        assert_eq!(found(&files), Vec::<String>::new());
    }

    #[test]
    fn a_tree_comments_and_tests_are_no_circle() {
        let files = [
            ("", "mod a; mod b;"),
            ("a", "use super::b::X;"),
            (
                "b",
                "// use super::a::W;\nuse std::io;\n#[cfg(test)]\nmod tests {\n    use super::super::a::W;\n}",
            ),
        ];
        assert_eq!(found(&files), Vec::<String>::new());
    }
}
