//! The files of a crate that depend on each other in a circle.
//!
//! A file depends on another one if a path of its code names an item that the other one declares. Re-exports
//! are followed to the file of the declaration, so a parent that only declares its child and re-exports the
//! child's items does not depend on it, and a file that imports them by way of the parent depends on the
//! child alone. A private `use` counts as code, as traits are imported for their methods; `pub use` counts if
//! the file names the item elsewhere. A parent whose code uses its child, while the child uses the parent's
//! items, is a circle. Tests are left out. Methods are not seen: only paths are, and in macros those of
//! arguments that are expressions.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use walkdir::WalkDir;

use super::names::{Names, names_of};

/// A module's path from the crate's root.
type Module = Vec<String>;
type Files = BTreeMap<Module, Names>;
type Graph = BTreeMap<Module, BTreeSet<Module>>;

/// Most re-exports that a name is followed through.
const STEPS_MAX: usize = 16;

/// Names the modules of the crate at `sources` that are in a circle of imports; each circle once.
pub(super) fn of(sources: &Path) -> Result<Vec<String>> {
    let mut files = collect(sources)?;
    remove_tests(&mut files);
    Ok(circles_of(&graph(&files)))
}

/// Removes the modules that are declared for tests only, with those below them.
fn remove_tests(files: &mut Files) {
    let declared = |(module, names): (&Module, &Names)| {
        names.test_modules.iter().map(|name| child(module, name)).collect::<Vec<_>>()
    };
    let tests: Vec<Module> = files.iter().flat_map(declared).collect();
    files.retain(|module, _| !tests.iter().any(|test| module.starts_with(test)));
}

fn child(module: &[String], name: &str) -> Module {
    [module, &[name.to_owned()]].concat()
}

/// Every file below `directory` but tests, by its module.
fn collect(directory: &Path) -> Result<Files> {
    let mut files = Files::new();
    for entry in WalkDir::new(directory) {
        let path = entry?.into_path();
        let inside = path.strip_prefix(directory)?.with_extension("");
        let mut module: Module = inside.iter().map(|name| name.to_string_lossy().into_owned()).collect();
        if path.extension().is_none_or(|extension| extension != "rs") || inside.ends_with("tests") {
            continue;
        }
        module.pop_if(|name| ["lib", "main", "mod"].contains(&name.as_str()));
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        files.insert(module, names_of(&text).with_context(|| path.display().to_string())?);
    }
    Ok(files)
}

fn graph(files: &Files) -> Graph {
    let used = |(module, names): (&Module, &Names)| {
        let private = names.imports.values().filter(|import| !import.re_exported).map(|import| &import.path);
        let paths = names.paths.iter().chain(private).chain(&names.unnamed);
        let used = paths.filter_map(|path| resolve(files, module, path, STEPS_MAX));
        (module.clone(), used.filter(|used| used != module).collect())
    };
    files.iter().map(used).collect()
}

/// Returns the file that declares the item to which a path in `module` leads. `None`: it is outside of the
/// crate, of the file itself, or a module, whose items count where they are named.
fn resolve(files: &Files, module: &Module, path: &[String], steps: usize) -> Option<Module> {
    let supers = path.iter().take_while(|name| *name == "super").count();
    let (depth, roots) = match path.first()?.as_str() {
        "crate" => (0, 1),
        "self" => (module.len(), 1),
        _ => (module.len().checked_sub(supers)?, supers),
    };
    let (mut at, mut rest, is_relative) = (module[..depth].to_vec(), &path[roots..], roots == 0);
    while let Some((name, further)) = rest.split_first() {
        if files.contains_key(&child(&at, name)) && !(is_relative && further.is_empty()) {
            at.push(name.clone());
        } else if let Some(import) = files.get(&at)?.imports.get(name).filter(|import| import.path != path) {
            let path = [&import.path[..], further].concat();
            return resolve(files, &at, &path, steps.checked_sub(1)?);
        } else if is_relative && at == *module {
            return None;
        } else {
            return files.contains_key(&at).then_some(at);
        }
        rest = further;
    }
    None
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

    fn module(path: &str) -> Module {
        path.split("::").filter(|name| !name.is_empty()).map(str::to_owned).collect()
    }

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let mut files = files.iter().map(|(path, text)| (module(path), names_of(text).unwrap())).collect();
        remove_tests(&mut files);
        circles_of(&graph(&files))
    }

    #[test]
    fn a_circle_is_found_however_long() {
        let files = [
            ("", "mod a; mod b; mod c;"),
            ("a", "use std::fmt;\nuse super::b::{self, X};\n"),
            ("b", "use crate::{\n    c::Y as Z, // re-exported\n};\nmod d;"),
            ("b::d", "use super::super::a::W;"),
            ("c", "use super::b::d::V;"),
        ];
        assert_eq!(found(&files), ["a, b, b::d, c"]);
    }

    #[test]
    fn a_parent_and_its_child_are_a_circle_if_each_uses_the_other() {
        let parent = "mod b;\nuse b::X;\npub struct Y(X);";
        assert_eq!(found(&[("a", parent), ("a::b", "use super::Y;\npub struct X;")]), ["a, a::b"]);
        assert_eq!(found(&[("a", parent), ("a::b", "pub struct X;")]), Vec::<String>::new());
    }

    #[test]
    fn a_re_export_is_no_import_by_the_parent() {
        let child = ("a::b", "use super::Y;\npub struct X;");
        let declares = "mod b;\npub(crate) use b::X;\npub struct Y;";
        assert_eq!(found(&[("a", declares), child]), Vec::<String>::new());
        let uses = "mod b;\npub(crate) use b::X;\npub struct Y { x: Vec<X> }";
        assert_eq!(found(&[("a", uses), child]), ["a, a::b"]);
    }

    #[test]
    fn a_re_export_leads_to_the_file_of_the_declaration() {
        let files = [
            ("", "mod a; mod c;"),
            ("a", "mod b;\npub use b::X;\nuse crate::c::Z;"),
            ("a::b", "pub struct X;"),
            ("c", "use crate::a::X;\npub struct Z;"),
        ];
        assert_eq!(found(&files), Vec::<String>::new());
        let files =
            [("a", "pub struct X; fn f() -> crate::c::Z {}"), ("c", "use super::a;\nfn g() -> a::X {}")];
        assert_eq!(found(&[("", ""), files[0], files[1]]), ["a, c"]);
    }

    #[test]
    fn siblings_that_name_each_other_in_a_path_are_a_circle() {
        let files = [
            ("a", "mod b; mod c;"),
            ("a::b", "fn f() { super::c::g() }"),
            ("a::c", "use super::b;\nfn g() { b::f() }"),
        ];
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
