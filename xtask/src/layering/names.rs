//! The names that a file declares and uses, without its tests.

use std::collections::BTreeMap;

use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, Token, UseTree, Visibility};

/// A path as it is written: `super::b::X`.
pub(super) type Path = Vec<String>;

/// Path that `use` binds to a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Import {
    pub(super) path: Path,
    /// It has a visibility: other files may reach the item through this one.
    pub(super) re_exported: bool,
}

/// Names of one file.
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

pub(super) fn names_of(source: &str) -> syn::Result<Names> {
    let mut names = Names::default();
    names.visit_file(&syn::parse_file(source)?);
    Ok(names)
}

/// Returns true for `#[cfg(test)]` and `#[cfg(all(test, …))]`.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let list = attribute.meta.require_list().ok().filter(|list| list.path.is_ident("cfg"));
        list.is_some_and(|list| {
            let condition = list.tokens.to_string().replace(' ', "");
            condition == "test" || condition.starts_with("all(test,")
        })
    })
}

/// Visits these nodes unless they are for tests only.
macro_rules! without_tests {
    ($($visit:ident: $node:ident),*) => {
        $(fn $visit(&mut self, node: &'ast syn::$node) {
            if !is_for_tests(&node.attrs) {
                visit::$visit(self, node);
            }
        })*
    };
}

impl<'ast> Visit<'ast> for Names {
    without_tests!(
        visit_item_fn: ItemFn, visit_item_impl: ItemImpl, visit_item_struct: ItemStruct, visit_item_enum: ItemEnum,
        visit_item_const: ItemConst, visit_item_type: ItemType, visit_item_trait: ItemTrait, visit_impl_item_fn: ImplItemFn,
        visit_field: Field, visit_field_value: FieldValue, visit_variant: Variant, visit_arm: Arm, visit_local: Local,
        visit_expr_block: ExprBlock, visit_expr_call: ExprCall, visit_expr_method_call: ExprMethodCall, visit_stmt_macro: StmtMacro
    );

    fn visit_item_mod(&mut self, node: &'ast syn::ItemMod) {
        match (is_for_tests(&node.attrs), &node.content) {
            (true, None) => self.test_modules.push(node.ident.to_string()),
            (true, Some(_)) => {}
            (false, _) => visit::visit_item_mod(self, node),
        }
    }

    fn visit_item_use(&mut self, node: &'ast syn::ItemUse) {
        if !is_for_tests(&node.attrs) {
            self.add(Vec::new(), &node.tree, !matches!(node.vis, Visibility::Inherited));
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.paths.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, node: &'ast syn::Macro) {
        // Only arguments that are expressions.
        let expressions = node.parse_body_with(Punctuated::<Expr, Token![,]>::parse_terminated);
        for expression in expressions.iter().flatten() {
            // The names outlive it.
            Names::visit_expr(self, expression);
        }
    }
}

impl Names {
    /// Adds the branches of a use tree.
    fn add(&mut self, mut path: Path, tree: &UseTree, re_exported: bool) {
        let (named, renamed) = match tree {
            UseTree::Path(tree) => {
                path.push(tree.ident.to_string());
                return self.add(path, &tree.tree, re_exported);
            }
            UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.add(path.clone(), tree, re_exported));
            }
            UseTree::Glob(_) => return self.unnamed.push(path),
            UseTree::Name(tree) => (&tree.ident, None),
            UseTree::Rename(tree) => (&tree.ident, Some(tree.rename.to_string())),
        };
        if named != "self" {
            path.push(named.to_string());
        }
        match renamed.or(path.last().cloned()) {
            Some(name) if name != "_" => drop(self.imports.insert(name, Import { path, re_exported })),
            _ => self.unnamed.push(path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> Path {
        text.split("::").map(str::to_owned).collect()
    }

    #[test]
    fn a_use_tree_binds_the_name_of_each_branch() {
        let source = "use super::{a::{self, X}, b::Y as Z};\npub(crate) use c::{W,};\nuse d::T as _;";
        let names = names_of(source).unwrap();
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
    fn paths_are_read_also_in_macros_but_not_those_of_tests() {
        let source = "#[cfg(test)]\nmod checks;\nstruct S {\n    #[cfg(test)]\n    a: A,\n    b: B,\n}\n\
            #[cfg(all(test, unix))]\nimpl C { fn d() -> E {} }\n#[cfg(test)]\nmod tests { struct F(G); }\n\
            fn f() { let x: super::i::J<K> = format!(\"{}\", l::m(n)); }";
        let names = names_of(source).unwrap();
        assert_eq!(names.test_modules, ["checks"]);
        for wanted in ["B", "super::i::J", "K", "l::m", "n"] {
            assert!(names.paths.contains(&path(wanted)), "{wanted}: {:?}", names.paths);
        }
        for test in ["A", "C", "E", "G"] {
            assert!(!names.paths.contains(&path(test)), "{test}: {:?}", names.paths);
        }
    }
}
