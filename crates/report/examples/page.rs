//! Prints a page with one chart: `cargo run --example page > page.html`.

use serde_json::json;
use towline_report::{Bar, Emphasis, Group, Svg, bars, page};

fn main() -> Result<(), towline_report::Error> {
    let group = Group {
        name: "restore into cold memory".into(),
        bars: [
            ("QEMU's own", "0.39 (0.36–0.40)", Emphasis::Peer),
            ("towline", "0.37 (0.36–0.38)", Emphasis::Own),
        ]
        .into_iter()
        .filter_map(|(label, figure, emphasis)| Bar::new(label, figure, emphasis))
        .collect(),
    };
    let chart = bars("seconds", &[group])?;
    let sections = [
        json!({ "kind": "table", "title": "Summary", "rows": [["guest", "3 GiB"]] }),
        json!({ "kind": "chart", "title": "Time", "svg": chart.as_ref().map(Svg::as_str), "figures": null }),
    ];
    print!("{}", page("Restore", "", &sections)?);
    Ok(())
}
