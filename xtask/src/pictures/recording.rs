//! A recording of the demonstration: asciicast v2, and the same as an animated SVG.
//!
//! What the demonstration writes is plain text, line by line; other control characters are refused. The SVG has each line as text
//! that appears at its time, and moves up when the screen is full. A viewer without animations shows the end.

use std::fmt::Write as _;
use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::json;
use towline_report::escape;

use super::output::write;

const CAST: &str = "demo.cast";
const COLUMNS: usize = 100;
const ROWS: usize = 28;
/// Maximum pause in the SVG, in seconds; the recording has the real one.
const PAUSE_MAX: f64 = 1.2;
/// Time for each line of the SVG, in which it can be read; the recording has the real one.
const LINE_TIME: f64 = 0.22;
/// Time for which the end is shown.
const END: f64 = 6.0;
const LINE_PIXELS: f64 = 18.0;
const LETTER_PIXELS: f64 = 8.0;
const MARGIN: f64 = 14.0;
/// Line of the demonstration with which a recording begins: set-up and build are before it.
const BEGIN: &str = "Files are in ";

/// Text that appeared at a time in seconds.
#[derive(Debug, Clone, PartialEq)]
struct Output {
    at: f64,
    text: String,
}

/// Runs the demonstration and writes `demo.cast`.
pub(super) fn record(directory: &Path) -> Result<()> {
    let outputs = from_begin(run_demo()?)?;
    write(&directory.join(CAST), &cast(&outputs))
}

/// Draws `demo.svg`, from `demo.cast`.
pub(super) fn draw(directory: &Path) -> Result<()> {
    let path = directory.join(CAST);
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let outputs = outputs_of(&text).with_context(|| path.display().to_string())?;
    write(&directory.join("demo.svg"), &svg(&Screen::of(&outputs)))
}

fn run_demo() -> Result<Vec<Output>> {
    let mut demo = Command::new(std::env::current_exe()?);
    let mut child = demo.arg("demo").stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let mut pipe = child.stdout.take().context("the output was asked for")?;
    let started = Instant::now();
    let (mut outputs, mut rest, mut buffer) = (Vec::new(), Vec::new(), [0; 4096]);
    loop {
        let length = pipe.read(&mut buffer)?;
        if length == 0 {
            break;
        }
        rest.extend_from_slice(&buffer[..length]);
        // A letter may be cut.
        let valid = match std::str::from_utf8(&rest) {
            Ok(text) => text.len(),
            Err(error) => error.valid_up_to(),
        };
        let text = String::from_utf8(rest.drain(..valid).collect())?;
        print!("{text}");
        outputs.push(Output { at: started.elapsed().as_secs_f64(), text });
    }
    let status = child.wait()?;
    ensure!(status.success(), "the demonstration failed with {status}");
    Ok(outputs)
}

/// Leaves out what precedes the demonstration itself.
fn from_begin(outputs: Vec<Output>) -> Result<Vec<Output>> {
    let mut found: Vec<Output> = Vec::new();
    for Output { at, text } in outputs {
        let text = match (found.first(), text.find(BEGIN)) {
            (None, None) => continue,
            (None, Some(index)) => text[index..].to_owned(),
            (Some(_), _) => text,
        };
        if let Some(letter) = text.chars().find(|letter| letter.is_control() && *letter != '\n') {
            bail!("the demonstration wrote {letter:?}, which no line has");
        }
        let begin = found.first().map_or(at, |first| first.at);
        found.push(Output { at: if found.is_empty() { begin } else { at }, text });
    }
    let begin = found.first().context("the demonstration wrote nothing")?.at;
    found.iter_mut().for_each(|output| output.at -= begin);
    Ok(found)
}

/// Formats asciicast v2.
fn cast(outputs: &[Output]) -> String {
    let header = json!({ "version": 2, "width": COLUMNS, "height": ROWS, "idle_time_limit": 2.0, "title": "make demo" });
    let mut text = format!("{header}\n");
    for Output { at, text: output } in outputs {
        let line = json!([(at * 1000.0).round() / 1000.0, "o", output.replace('\n', "\r\n")]);
        let _ = writeln!(text, "{line}");
    }
    text
}

/// Parses what [`cast`] has formatted.
fn outputs_of(cast: &str) -> Result<Vec<Output>> {
    let output = |line: &str| {
        let (at, kind, text): (f64, String, String) = serde_json::from_str(line)?;
        ensure!(kind == "o", "an event {kind:?}, expected output");
        Ok(Output { at, text: text.replace("\r\n", "\n") })
    };
    cast.lines().skip(1).map(output).collect()
}

/// A line of the screen as it was for a time.
#[derive(Debug, Clone, PartialEq)]
struct Shown {
    row: usize,
    text: String,
    from: f64,
    /// `None`: until the end.
    until: Option<f64>,
}

/// All lines, and the times at which another row was begun below the screen.
#[derive(Debug, PartialEq)]
struct Screen {
    lines: Vec<Shown>,
    scrolls: Vec<f64>,
    end: f64,
}

impl Screen {
    fn of(outputs: &[Output]) -> Self {
        let mut screen = Self { lines: Vec::new(), scrolls: Vec::new(), end: 0.0 };
        let (mut row, mut line, mut now, mut before) = (0, String::new(), 0.0, 0.0);
        for Output { at, text } in outputs {
            now += (at - before).clamp(0.0, PAUSE_MAX);
            before = *at;
            for (index, part) in text.split('\n').enumerate() {
                if index > 0 {
                    row += 1;
                    now += LINE_TIME;
                    line.clear();
                    if row >= ROWS {
                        screen.scrolls.push(now);
                    }
                }
                let mut letters = part.chars().peekable();
                while letters.peek().is_some() {
                    if line.chars().count() == COLUMNS {
                        row += 1;
                        line.clear();
                        if row >= ROWS {
                            screen.scrolls.push(now);
                        }
                    }
                    let space = COLUMNS - line.chars().count();
                    line.extend(letters.by_ref().take(space));
                    screen.show(row, &line, now);
                }
            }
        }
        screen.end = now + END;
        screen
    }

    fn show(&mut self, row: usize, text: &str, now: f64) {
        if let Some(last) = self.lines.last_mut().filter(|last| last.row == row) {
            if last.from == now {
                text.clone_into(&mut last.text);
                return;
            }
            last.until = Some(now);
        }
        self.lines.push(Shown { row, text: text.to_owned(), from: now, until: None });
    }
}

/// Formats the animation.
fn svg(screen: &Screen) -> String {
    let (width, height) =
        (COLUMNS as f64 * LETTER_PIXELS + 2.0 * MARGIN, ROWS as f64 * LINE_PIXELS + 2.0 * MARGIN);
    let percent = |at: f64| at / screen.end * 100.0;
    let mut style = String::from(
        "svg { background: #111827; } text { fill: #e5e7eb; font: 13px ui-monospace, 'DejaVu Sans Mono', monospace; white-space: pre; } \
         .command { fill: #60a5fa; } .heading { fill: #facc15; }\n",
    );
    let last = screen.scrolls.len() as f64 * LINE_PIXELS;
    let _ = writeln!(
        style,
        "#screen {{ transform: translateY(-{last}px); animation: scroll {:.2}s step-end infinite; }}",
        screen.end
    );
    let _ = write!(style, "@keyframes scroll {{ 0% {{ transform: none; }}");
    for (index, at) in screen.scrolls.iter().enumerate() {
        let up = (index + 1) as f64 * LINE_PIXELS;
        let _ = write!(style, " {:.3}% {{ transform: translateY(-{up}px); }}", percent(*at));
    }
    style.push_str(" }\n");
    let mut body = String::new();
    for (index, line) in screen.lines.iter().enumerate() {
        let (from, until) = (percent(line.from), line.until.map(percent));
        let after = until.map(|until| format!(" {until:.3}% {{ opacity: 0; }}")).unwrap_or_default();
        let rest = u8::from(line.until.is_none());
        let _ = writeln!(
            style,
            "#l{index} {{ opacity: {rest}; animation: k{index} {:.2}s step-end infinite; }} @keyframes k{index} {{ 0% {{ opacity: 0; }} {from:.3}% {{ opacity: 1; }}{after} }}",
            screen.end
        );
        let class = match line.text.trim_start() {
            text if text.starts_with("$ ") => " class=\"command\"",
            _ if !line.text.starts_with(' ') => " class=\"heading\"",
            _ => "",
        };
        let y = MARGIN + (line.row as f64 + 0.75) * LINE_PIXELS;
        let _ = writeln!(
            body,
            "<text id=\"l{index}\" x=\"{MARGIN}\" y=\"{y}\"{class}>{}</text>",
            escape(&line.text)
        );
    }
    style.push_str(
        "@media (prefers-reduced-motion: reduce) { text, #screen { animation: none !important; } }\n",
    );
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\">\n\
         <title>make demo</title>\n<style>\n{style}</style>\n<rect width=\"100%\" height=\"100%\" fill=\"#111827\"/>\n\
         <g id=\"screen\">\n{body}</g>\n</svg>\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(at: f64, text: &str) -> Output {
        Output { at, text: text.into() }
    }

    #[test]
    fn a_recording_begins_with_the_demonstration_and_is_a_cast() {
        let outputs =
            vec![output(5.0, "built\nFiles are in x\n"), output(7.5, "  start … "), output(8.0, " 0.5 s\n")];
        let found = from_begin(outputs).unwrap();
        assert_eq!(
            found,
            [output(0.0, "Files are in x\n"), output(2.5, "  start … "), output(3.0, " 0.5 s\n")]
        );
        let cast = cast(&found);
        let lines: Vec<serde_json::Value> =
            cast.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((&lines[0]["version"], &lines[2]), (&json!(2), &json!([2.5, "o", "  start … "])));
        assert!(from_begin(vec![output(0.0, "Files are in x\u{1b}[1m")]).is_err());
        assert!(from_begin(vec![output(0.0, "other")]).is_err());
        assert_eq!(outputs_of(&cast).unwrap(), found);
        assert!(outputs_of("{}\n[1.0, \"i\", \"x\"]").is_err());
    }

    #[test]
    fn the_published_picture_is_that_of_the_published_recording() {
        let published = crate::command::root().join("docs/pictures");
        let directory = tempfile::tempdir().unwrap();
        std::fs::copy(published.join(CAST), directory.path().join(CAST)).unwrap();
        draw(directory.path()).unwrap();
        let read = |directory: &Path| std::fs::read_to_string(directory.join("demo.svg")).unwrap();
        let picture = read(directory.path());
        assert!(picture == read(&published), "run `cargo xtask pictures --drawn`");
        assert!(picture.len() <= 200_000 && picture.contains("inspect --verify"), "{}", picture.len());
    }

    #[test]
    fn a_line_that_grows_is_replaced_and_a_full_screen_moves_up() {
        let mut outputs = vec![output(0.0, "a … "), output(60.0, "done\n")];
        let screen = Screen::of(&outputs);
        let shown = |text: &str, from, until| Shown { row: 0, text: text.into(), from, until };
        assert_eq!(screen.lines, [shown("a … ", 0.0, Some(PAUSE_MAX)), shown("a … done", PAUSE_MAX, None)]);
        assert!(screen.scrolls.is_empty());
        outputs.push(output(61.0, &"x\n".repeat(ROWS)));
        let screen = Screen::of(&outputs);
        assert_eq!(screen.scrolls.len(), 2);
        assert!((screen.scrolls[1] - screen.scrolls[0] - LINE_TIME).abs() < 1e-9, "lines that come at once");
        let long = Screen::of(&[output(0.0, &"é".repeat(COLUMNS + 3))]);
        assert_eq!(long.lines.iter().map(|line| line.row).collect::<Vec<_>>(), [0, 1]);
        let svg = svg(&screen);
        assert!(
            svg.contains("a … done") && svg.contains("translateY(-36px)") && !svg.contains("href"),
            "{svg}"
        );
    }
}
