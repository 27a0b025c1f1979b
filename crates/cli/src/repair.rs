//! `towline repair`: puts back what a towline that was killed has left changed in a QEMU, and removes what it left of an image.

use std::path::Path;

use serde_json::json;
use towline_control::moves;
use towline_control::plan::Source;
use towline_control::qemu::{Qemu, RepairReport};
use towline_image::leftover::{self, Partial};
use towline_qmp::Options;

use crate::Exit;
use crate::args::RepairArgs;
use crate::console;
use crate::progress::Reporter;
use crate::units::size;

/// Runs `repair`.
pub(crate) fn run(args: &RepairArgs) -> Exit {
    let reporter = Reporter::new(&args.output);
    let path = match args.target.source() {
        Ok(Source::Qmp(path)) => path,
        Ok(Source::Image(path)) => return partials(&reporter, &path),
        Ok(_) => {
            return usage(&format!(
                "{}: only a QEMU (qmp:PATH), an image and a directory of images can be repaired",
                args.target
            ));
        }
        Err(text) => return usage(&text),
    };
    let socket = path.display().to_string();
    tell_undecided(&path);
    match Qemu::repair(&path, &Options::default()) {
        Ok(None) => {
            reporter.event(
                "repaired",
                json!({ "socket": socket, "owner-pid": null, "done": [], "left": [], "exit": 0 }),
            );
            reporter.line(&format!("QEMU on {socket}: nothing to repair"));
            Exit::Done
        }
        Ok(Some(repaired)) => tell(&reporter, &repaired),
        Err(error) => {
            reporter.event(
                "failed",
                json!({ "socket": socket, "error": error.to_string(), "exit": Exit::Safe.code() }),
            );
            eprintln!("towline: {error}");
            Exit::Safe
        }
    }
}

/// What `repair` does not do: a guest that was being handed over is `resume`'s.
fn tell_undecided(path: &std::path::Path) {
    let Ok(qemu) = Qemu::inspect(path, &Options::default()) else { return };
    for id in moves::undecided_of(&qemu) {
        console::error(&format!(
            "note: the guest of this QEMU has a part in move {id}, which is undecided: towline resume {id}"
        ));
    }
}

fn tell(reporter: &Reporter, repaired: &RepairReport) -> Exit {
    let RepairReport { socket, owner, done, left, .. } = repaired;
    let exit = if left.is_empty() { Exit::Done } else { Exit::Safe };
    let fields =
        json!({ "socket": socket, "owner-pid": owner, "done": done, "left": left, "exit": exit.code() });
    reporter.event("repaired", fields);
    reporter.line(&format!("QEMU on {socket} was left changed by a towline that is gone (process {owner})"));
    for text in done {
        reporter.line(&format!("  repaired      {text}"));
    }
    for text in left {
        reporter.line(&format!("  not repaired  {text}"));
    }
    exit
}

/// Removes the partial files of an image, or lists those in a directory.
fn partials(reporter: &Reporter, path: &Path) -> Exit {
    let is_directory = path.is_dir();
    let found = if is_directory { leftover::list(path) } else { leftover::remove(path) };
    let shown = path.display().to_string();
    let found = match found {
        Ok(found) => found,
        Err(error) => {
            let fields = json!({ "path": shown, "error": error.to_string(), "exit": Exit::Safe.code() });
            reporter.event("failed", fields);
            eprintln!("towline: {error}");
            return Exit::Safe;
        }
    };
    let files: Vec<_> = found
        .iter()
        .map(|Partial { path, allocated, writer }| {
            let removed = !is_directory && writer.is_none();
            json!({ "path": path, "allocated": allocated, "writer": writer, "removed": removed })
        })
        .collect();
    reporter.event("repaired", json!({ "path": shown, "partials": files, "exit": 0 }));
    if found.is_empty() {
        reporter.line(&format!("{shown}: no partial files"));
    }
    for Partial { path, allocated, writer } in &found {
        let what = match writer {
            Some(writer) => format!("stays: {writer} writes it"),
            None if is_directory => "left by a writer that is gone; `towline repair IMAGE` removes it".into(),
            None => "removed".into(),
        };
        reporter.line(&format!("{}  {} allocated  {what}", path.display(), size(*allocated)));
    }
    Exit::Done
}

fn usage(text: &str) -> Exit {
    eprintln!("towline: {text}");
    Exit::Usage
}
