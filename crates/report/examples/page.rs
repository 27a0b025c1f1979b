//! Prints a page with one chart: `cargo run --example page > page.html`.

use serde_json::json;
use towline_report::{Bar, Svg, bars, page};

fn main() -> Result<(), towline_report::Error> {
    let bar = |(label, count): (&str, u64)| Bar { label: label.to_owned(), count };
    let chart = bars("faults", &[("0 to 10 µs", 120), ("10 to 20 µs", 35)].map(bar))?;
    let sections = [
        json!({ "kind": "table", "title": "Summary", "rows": [["guest", "3 GiB"]] }),
        json!({ "kind": "chart", "title": "Block times", "svg": chart.as_ref().map(Svg::as_str) }),
    ];
    print!("{}", page("Restore", "", &sections)?);
    Ok(())
}
