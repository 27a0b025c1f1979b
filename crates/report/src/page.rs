//! A page: sections in their order, formatted by one template. Text of others is escaped there.
//!
//! A section is an object with a `kind`, and a `title`, which is its heading:
//!
//! ```text
//!   table   rows: [name, value]
//!   list    items                                             no heading without items
//!   parts   parts: {name, share, color, cells}, note          a bar and a table; no heading without parts
//!   chart   svg
//!   tracks  legend, heads, tracks: {name, begin, parts, result}
//!   maps    legend, maps: {name, text, width, height, cells: {class, x, y, width, height}}
//!   tree    branches: {name, text, branches}
//! ```
//! A share is one of 1. Colors are numbers, of which there are [`PHASE_COLORS`]. The first cell of a part is
//! its tooltip.

use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Output, UndefinedBehavior, context};

use crate::Error;
use crate::svg::STYLE;

const TEMPLATE: &str = include_str!("page.html");
/// Number of classes of the style sheet for parts of a bar: `p0` and so on.
pub const PHASE_COLORS: usize = 10;

/// Formats a page without scripts, which loads nothing. `about` is its first line; empty: it has none.
///
/// # Errors
/// A section is not as described in the module's source.
pub fn page(title: &str, about: &str, sections: &[serde_json::Value]) -> Result<String, Error> {
    let mut environment = Environment::empty();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_keep_trailing_newline(true);
    // Macros return text that was escaped.
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_formatter(|output: &mut Output<'_>, _, value| {
        let text = if value.is_safe() { value.to_string() } else { escape(&value.to_string()) };
        Ok(output.write_str(&text)?)
    });
    environment.add_filter("safe", Value::from_safe_string);
    environment.add_filter("percent", |share: f64| format!("{:.3}", share * 100.0));
    let page = context! { title, about, sections, style => STYLE };
    environment.render_named_str("page.html", TEMPLATE, page).map_err(Error::of)
}

/// Escapes text for HTML: endpoints and errors contain names that others chose.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            letter if letter.is_control() => escaped.push('\u{fffd}'),
            letter => escaped.push(letter),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use serde_json::json;

    use super::*;

    #[test]
    fn text_is_escaped() {
        let hostile = "<a> & \"b\"\u{1b}[1m";
        let escaped = "&lt;a&gt; &amp; &quot;b&quot;\u{fffd}[1m";
        let part = json!({ "name": hostile, "share": 0.5, "color": 0, "cells": [hostile] });
        let leaf = json!({ "name": hostile, "text": hostile, "branches": [] });
        let map = json!({ "name": hostile, "text": hostile, "width": 1, "height": 1, "cells": [] });
        let track = json!({ "name": hostile, "begin": hostile, "parts": [part], "result": hostile });
        let sections = [
            json!({ "kind": "table", "title": hostile, "rows": [[hostile, hostile]] }),
            json!({ "kind": "list", "title": hostile, "items": [hostile] }),
            json!({ "kind": "parts", "title": hostile, "parts": [part], "note": hostile }),
            json!({ "kind": "chart", "title": hostile, "svg": "<svg></svg>" }),
            json!({ "kind": "tracks", "title": hostile, "legend": [hostile], "heads": [hostile], "tracks": [track] }),
            json!({ "kind": "maps", "title": hostile, "legend": [hostile], "maps": [map] }),
            json!({ "kind": "tree", "title": hostile, "branches": [{ "name": hostile, "text": "", "branches": [leaf] }] }),
        ];
        let html = page(hostile, hostile, &sections).unwrap();
        assert!(!html.contains("<a>") && !html.contains('\u{1b}'), "{html}");
        assert_eq!(html.matches(escaped).count(), 32, "{html}");
        assert!(html.starts_with("<!doctype html>\n") && html.ends_with("</html>\n"), "{html}");
        for reference in ["<script", "src=", "href=", "@import", "url("] {
            assert!(!html.contains(reference), "{reference}");
        }
    }

    #[test]
    fn sections_without_items_have_no_heading_and_unknown_ones_are_errors() {
        let list = json!({ "kind": "list", "title": "Nothing", "items": [] });
        let parts = json!({ "kind": "parts", "title": "Nothing", "parts": [], "note": null });
        assert!(!page("a", "", &[list, parts]).unwrap().contains("Nothing"));
        assert!(page("a", "", &[json!({ "kind": "lists", "title": "a" })]).is_err());
        assert!(page("a", "", &[json!({ "kind": "list", "title": "a" })]).is_err());
    }

    #[test]
    fn parts_are_as_long_as_their_shares() {
        let part =
            |name, share: f64| json!({ "name": name, "share": share, "color": 11, "cells": ["1 s", "<x>"] });
        let parts = [part("a & b", 0.25), part("c", 0.75)];
        let body =
            page("a", "", &[json!({ "kind": "parts", "title": "Whole", "parts": parts, "note": null })]);
        let body = body.unwrap();
        assert!(body.contains("class=\"p1\" style=\"width:25.000%\" title=\"a &amp; b: 1 s\""), "{body}");
        assert!(body.contains("width:75.000%"), "{body}");
        assert!(body.contains("</i> c</th><td>1 s</td><td>&lt;x&gt;</td>"), "{body}");
    }

    #[test]
    fn phases_have_colors_of_their_own() {
        let color = |class: usize| {
            let (_, rest) = STYLE.split_once(&format!("\n.p{class} {{ background: ")).unwrap_or_default();
            rest.split_once(';').unwrap_or_default().0
        };
        let colors: std::collections::BTreeSet<_> = (0..PHASE_COLORS).map(color).collect();
        assert_eq!(colors.len(), PHASE_COLORS);
        assert!(!colors.contains(""));
        assert_eq!(TEMPLATE.matches(&format!(" % {PHASE_COLORS} }}}}\"")).count(), 3);
    }
}
