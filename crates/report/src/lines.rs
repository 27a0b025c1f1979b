//! Lines over time, as SVG. Colors come from the page's style, which has a dark variant.

use plotters::prelude::*;

use crate::Error;
use crate::svg::{Drawn, Svg};

const HEIGHT: u32 = 260;
const MARGIN: u32 = 10;
const X_LABELS: u32 = 36;
const Y_LABELS: u32 = 72;
/// Space for the names of the lines, above the highest value.
const HEADROOM: f64 = 0.35;
const FONT: (&str, u32) = ("sans-serif", 15);

/// Color of a line or a bar. The style sheet has another one for it in the dark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ink {
    /// The first.
    Blue,
    /// The second.
    Orange,
}

impl Ink {
    fn color(self) -> RGBColor {
        match self {
            Self::Blue => RGBColor(37, 99, 235),
            Self::Orange => RGBColor(194, 65, 12),
        }
    }
}

/// A line of a chart.
#[derive(Debug, Clone, PartialEq)]
pub struct ChartLine {
    /// Name in the legend.
    pub name: &'static str,
    /// Color.
    pub ink: Ink,
    /// Seconds, and the value.
    pub points: Vec<(f64, f64)>,
}

/// Draws lines over the time in seconds. `None` if there is nothing to draw.
///
/// # Errors
/// The chart cannot be drawn.
pub fn lines(unit: &str, lines: &[ChartLine]) -> Result<Option<Svg>, Error> {
    let points = || lines.iter().flat_map(|line| &line.points);
    let end = points().map(|point| point.0).fold(0.0, f64::max);
    let top = points().map(|point| point.1).fold(0.0, f64::max);
    if end <= 0.0 || top <= 0.0 {
        return Ok(None);
    }
    let top = top * (1.0 + HEADROOM);
    Svg::for_any_width(|svg, width| draw(svg, width, unit, lines, [end, top])).map(Some)
}

fn draw(svg: &mut String, width: u32, unit: &str, lines: &[ChartLine], [end, top]: [f64; 2]) -> Drawn {
    let area = SVGBackend::with_string(svg, (width, HEIGHT)).into_drawing_area();
    let mut chart = ChartBuilder::on(&area)
        .margin(MARGIN)
        .x_label_area_size(X_LABELS)
        .y_label_area_size(Y_LABELS)
        .build_cartesian_2d(0.0..end, 0.0..top)?;
    let mut mesh = chart.configure_mesh();
    mesh.label_style(FONT).axis_desc_style(FONT).light_line_style(TRANSPARENT);
    mesh.x_desc("seconds").y_desc(unit).draw()?;
    for line in lines.iter().filter(|line| !line.points.is_empty()) {
        let style = line.ink.color().stroke_width(2);
        let series = chart.draw_series(LineSeries::new(line.points.iter().copied(), style))?;
        series.label(line.name).legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 16, y)], style));
    }
    chart.configure_series_labels().label_font(FONT).position(SeriesLabelPosition::UpperRight).draw()?;
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn lines_are_drawn_with_their_names_and_nothing_is_not_drawn() {
        let line =
            |points: &[(f64, f64)]| ChartLine { name: "sent", ink: Ink::Blue, points: points.to_vec() };
        let svg = lines("MiB/s", &[line(&[(0.0, 1.0), (1.0, 80.0), (2.0, 77.0)])]).unwrap().unwrap();
        let svg = svg.as_str();
        assert!(svg.starts_with("<svg") && svg.contains("<polyline") && svg.contains("sent"), "{svg}");
        assert!(svg.contains("seconds") && svg.contains("MiB/s"), "{svg}");
        // On a screen of 400 pixels the other one is shown.
        assert!(
            svg.contains("class=\"narrow\" width=\"360\"") && svg.contains("class=\"wide\" width=\"880\""),
            "{svg}"
        );
        assert_eq!(lines("MiB/s", &[line(&[])]).unwrap(), None);
        assert_eq!(lines("MiB/s", &[line(&[(0.0, 0.0), (1.0, 0.0)])]).unwrap(), None);
    }
}
