//! `towline inspect`.

mod html;

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{Value, json};
use towline_control::plan::{self, AfterCopy, CopyRequest, DiscardSink, Source, Task, TransferOptions};
use towline_control::qemu::Qemu;
use towline_image::manifest::sidecar_path;
use towline_image::{Image, LayerInfo, PageCount, StoredGuest as _};
use towline_migration::Guest as _;
use towline_protocol::device_state::{DeviceSection, DeviceState};
use towline_protocol::{BlockIndex, RamBlock};
use towline_qmp as qmp;

use crate::args::InspectArgs;
use crate::exit::{Exit, UsageError};
use crate::progress::Reporter;
use crate::sandbox::Policy;
use crate::signals::{SignalEffects, cancel_on_signals};
use crate::units::{count, counted, size};
use crate::{command_line, errors, events, sandbox};

/// Number of threads that compare an image with its checksums.
const VERIFY_THREADS: usize = 4;

/// Runs the command.
pub(crate) fn run(args: &InspectArgs) -> Result<Exit> {
    let reporter = Reporter::new(&args.output).blocking();
    let source = match args.source.source() {
        Ok(source) => source,
        Err(text) => return Err(UsageError(text).into()),
    };
    if args.verify && !source.is_image() {
        return Err(UsageError(format!("{}: --verify needs an image", args.source)).into());
    }
    if let (Some(page), false) = (&args.html, matches!(source, Source::Image(_))) {
        let text = format!("--html {}: {} is not an image file", page.display(), args.source);
        return Err(UsageError(text).into());
    }
    match policy(args, &source) {
        Some(policy) => args.sandbox.confine(policy),
        None => args.sandbox.log_unconfined(sandbox::EXEC_UNCONFINED),
    }
    let checksums = if args.verify { Checksums::Compared } else { Checksums::NotCompared };
    match source {
        Source::Image(path) => {
            if let Some(page) = &args.html {
                let base = args.base.as_deref().map(Image::open).transpose()?;
                html::write(page, &Image::open(&path)?, base.as_ref())?;
                reporter.line(&format!("{}: page about {}", page.display(), path.display()));
            }
            image(&reporter, &path, checksums)
        }
        #[cfg(feature = "store")]
        Source::Store(location) => stored_image(&reporter, &location, checksums),
        #[cfg(not(feature = "store"))]
        Source::Store(location) => {
            Err(UsageError(format!("{location}: this towline was built without object stores")).into())
        }
        Source::Qmp(path) => qemu(&reporter, &path),
        Source::Process(_) => {
            let text = format!(
                "{}: a synthetic guest exists only while it is copied; there is nothing to inspect",
                args.source
            );
            Err(UsageError(text).into())
        }
        Source::Stream(_) => stream(&reporter, &source, args),
    }
}

/// Returns the policy of the command. `None`: it cannot be confined.
pub(crate) fn policy(args: &InspectArgs, source: &Source) -> Option<Policy> {
    let mut policy = match source {
        Source::Image(path) => sandbox::policy_of_images(path),
        other => sandbox::policy_of_copy(other, &[], &request(other), None)?,
    };
    args.base.iter().for_each(|base| sandbox::permit_image(&mut policy, base));
    policy.write.extend(args.html.as_deref().map(sandbox::parent_directory));
    Some(policy)
}

/// Treatment of the checksums of an image (`--verify`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Checksums {
    Compared,
    NotCompared,
}

fn image(reporter: &Reporter, path: &Path, checksums: Checksums) -> Result<Exit> {
    let image = Image::open(path)?;
    if checksums == Checksums::Compared {
        image.verify(VERIFY_THREADS, &|_| {})?;
    }
    let allocated = image.file().metadata().with_context(|| path.display().to_string())?.blocks() * 512;
    let chain = image.layers().map(|layer| Layer::of(&layer)).collect::<Result<Vec<_>>>()?;
    let blocks = stored_blocks(image.ram_blocks(), |block| image.count_pages(block));
    let devices = image.devices();
    let facts = json!({
        "kind": "image",
        "path": path.display().to_string(),
        "machine-type": image.configuration().machine_type,
        "run-state": devices.run_state(),
        "length": image.length(),
        "allocated": allocated,
        "blocks": blocks,
        "device-state": { "offset": image.device_state_offset(), "length": devices.bytes().len() },
        "devices": devices_json(devices.devices()),
        "manifest": manifest(&image),
        "command-line": command_line::json(image.origin()),
        "verified": checksums == Checksums::Compared,
        "loadable-by-qemu": !image.is_incremental(),
        "chain": chain,
    });
    reporter.event("inspected", events::with_exit(facts, Exit::Done));
    let what = if image.is_incremental() {
        "an incremental image, which towline restores; `towline copy` merges it into a full one for QEMU"
    } else {
        "an image that QEMU 9.0 and later loads (`-incoming file:`, mapped-ram)"
    };
    reporter.line(&format!("{}: {what}", path.display()));
    print_head(reporter, Some(&image.configuration().machine_type), devices.run_state());
    reporter.line(&format!("  file          {} long, {} allocated", size(image.length()), size(allocated)));
    print_manifest(reporter, &image, checksums);
    command_line::print(reporter, image.origin());
    if image.is_incremental() {
        reporter.line(&format!("  chain         {} images, the full one last", chain.len()));
        chain.iter().for_each(|layer| layer.print(reporter));
    }
    print_blocks(reporter, &blocks);
    print_devices(reporter, devices.devices(), devices.bytes().len());
    Ok(Exit::Done)
}

/// Returns the field `manifest` of the event `inspected`.
fn manifest(image: &Image) -> Option<Value> {
    let manifest = image.manifest()?;
    Some(json!({
        "created": manifest.created().to_string(),
        "source": manifest.origin().source,
        "qemu": manifest.origin().qemu,
        "path": image.manifest_path().map(|path| path.display().to_string()),
        "sealed": image.is_sealed(),
    }))
}

fn print_manifest(reporter: &Reporter, image: &Image, checksums: Checksums) {
    let Some(manifest) = image.manifest() else {
        reporter.line("  manifest      none, as in images of QEMU itself: no checksums; `towline copy IMAGE NEW` adds them");
        return;
    };
    reporter.line(&format!(
        "  manifest      {}, from {}{}: {}",
        manifest.created(),
        manifest.origin().source,
        manifest.origin().qemu.as_ref().map(|qemu| format!(" (QEMU {qemu})")).unwrap_or_default(),
        if checksums == Checksums::Compared { "every checksum matches" } else { "not compared (--verify)" }
    ));
    if !image.is_sealed() {
        reporter.line(
            "                of an earlier version, without a checksum of the manifest itself; `towline copy IMAGE NEW` adds it",
        );
    }
    if let Some(path) = image.manifest_path().filter(|path| *path != sidecar_path(image.path())) {
        reporter.line(&format!(
            "                in {}, as after a crash: keep this file with the image",
            path.display()
        ));
    }
}

/// A RAM block.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Block<'a> {
    name: &'a str,
    length: u64,
    #[serde(flatten)]
    pages: Option<PageCount>,
    #[serde(skip_serializing_if = "Option::is_none")]
    page_size: Option<u64>,
}

fn stored_blocks(blocks: &[RamBlock], pages: impl Fn(BlockIndex) -> PageCount) -> Vec<Block<'_>> {
    let counted = |(index, block)| Block { pages: Some(pages(BlockIndex(index as u32))), ..Block::of(block) };
    blocks.iter().enumerate().map(counted).collect()
}

impl<'a> Block<'a> {
    fn of(block: &'a RamBlock) -> Self {
        Self { name: &block.name, length: block.length, pages: None, page_size: None }
    }
}

/// An image of a chain.
#[derive(Debug, Serialize)]
struct Layer {
    path: String,
    created: Option<String>,
    content: Option<String>,
    #[serde(rename = "chunks-read")]
    chunks: usize,
    allocated: u64,
}

impl Layer {
    fn of(layer: &LayerInfo<'_>) -> Result<Self> {
        let path = layer.path.display().to_string();
        Ok(Self {
            created: layer.manifest.map(|manifest| manifest.created().to_string()),
            content: layer.manifest.map(|manifest| manifest.content().to_string()),
            chunks: layer.chunks,
            allocated: layer.file.metadata().with_context(|| path.clone())?.blocks() * 512,
            path,
        })
    }

    fn print(&self, reporter: &Reporter) {
        let created = self.created.as_deref().unwrap_or("unknown");
        let (chunks, allocated) = (counted(self.chunks as u64, "own chunk"), size(self.allocated));
        reporter.line(&format!("    {:<38} {created}  {chunks:>18}  {allocated:>11} allocated", self.path));
    }
}

#[cfg(feature = "store")]
fn stored_image(
    reporter: &Reporter,
    location: &towline_image::Location,
    checksums: Checksums,
) -> Result<Exit> {
    let cancel = cancel_on_signals(SignalEffects::OF_READING)?;
    let image = towline_image::store::StoredImage::open(location, Some(cancel))?;
    if checksums == Checksums::Compared {
        image.verify(&|_| {})?;
    }
    let index = image.index();
    let blocks = stored_blocks(image.blocks(), |block| image.count_pages(block));
    let devices = image.devices();
    let chunks = index.all_names().count();
    let facts = json!({
        "kind": "stored-image",
        "location": location.to_string(),
        "machine-type": image.configuration().machine_type,
        "run-state": devices.run_state(),
        "chunk-size": index.chunk_bytes(),
        "chunks": chunks,
        "index-length": image.index_bytes(),
        "blocks": blocks,
        "device-state": { "length": devices.bytes().len() },
        "devices": devices_json(devices.devices()),
        "created": index.created().to_string(),
        "source": index.origin().source,
        "qemu": index.origin().qemu,
        "command-line": command_line::json(image.origin()),
        "verified": checksums == Checksums::Compared,
        "loadable-by-qemu": false,
    });
    reporter.event("inspected", events::with_exit(facts, Exit::Done));
    reporter.line(&format!("{location}: an image in an object store; QEMU loads a copy in a file"));
    print_head(reporter, Some(&image.configuration().machine_type), devices.run_state());
    reporter.line(&format!(
        "  chunks        {} of {}, named by an index of {}: {}",
        count(chunks as u64),
        size(index.chunk_bytes()),
        size(image.index_bytes()),
        if checksums == Checksums::Compared {
            "complete, and every checksum matches"
        } else {
            "not compared (--verify)"
        }
    ));
    let qemu = index.origin().qemu.as_ref().map(|qemu| format!(" (QEMU {qemu})")).unwrap_or_default();
    reporter.line(&format!("  created       {}, from {}{qemu}", index.created(), index.origin().source));
    command_line::print(reporter, image.origin());
    print_blocks(reporter, &blocks);
    print_devices(reporter, devices.devices(), devices.bytes().len());
    Ok(Exit::Done)
}

fn qemu(reporter: &Reporter, path: &Path) -> Result<Exit> {
    let qemu = Qemu::inspect(path, &qmp::Options::default())?;
    let facts = qemu.facts();
    let blocks: Vec<_> = facts
        .migrated_blocks()
        .map(|block| {
            let page_size = Some(block.page_bytes);
            Block { name: &block.name, length: block.used_bytes, pages: None, page_size }
        })
        .collect();
    let on: Vec<_> =
        facts.capabilities.iter().filter(|(_, on)| **on).map(|(name, _)| name.as_str()).collect();
    let shown = json!({
        "kind": "qemu",
        "version": qemu.version_text(),
        "machine-type": facts.machine,
        "run-state": facts.status.status.as_str(),
        "uuid": facts.uuid,
        "waits-for-migrate-incoming": facts.waits_for_migrate_incoming(),
        "blocked-reasons": facts.blocked_reasons(),
        "capabilities": on,
        "blocks": blocks,
    });
    reporter.event("inspected", events::with_exit(shown, Exit::Done));
    reporter.line(&format!("{}: QEMU {}", qemu.socket(), qemu.version_text()));
    print_head(reporter, Some(&facts.machine), Some(facts.status.status.as_str()));
    reporter.line(&format!("  uuid          {}", facts.uuid));
    reporter.line(&format!("  capabilities  {}", if on.is_empty() { "none".into() } else { on.join(", ") }));
    match facts.blocked_reasons() {
        [] => reporter.line("  migration     not blocked"),
        reasons => reporter.line(&format!("  migration     blocked: {}", reasons.join("; "))),
    }
    print_blocks(reporter, &blocks);
    Ok(Exit::Done)
}

/// Returns the request of a stream's inspection.
fn request(source: &Source) -> CopyRequest {
    let transfer = TransferOptions { multifd_channels: Some(0), ..TransferOptions::default() };
    let task = Task::Copy { transfer, after: AfterCopy::default(), base: None };
    CopyRequest { return_path: !crate::request::is_file(source), ..CopyRequest::new(task) }
}

fn stream(reporter: &Reporter, source: &Source, args: &InspectArgs) -> Result<Exit> {
    let survey = DiscardSink::default();
    let cancel =
        cancel_on_signals(SignalEffects { first: "cancelling; the source keeps its guest", second: None })?;
    let surveyed = plan::inspect_stream(source, &survey, &request(source), &cancel, reporter);
    reporter.finish();
    let moved = match surveyed {
        Ok(moved) => moved,
        Err(failure) => {
            let fields = json!({ "notes": failure.notes });
            let (text, reason) = (errors::worded(&failure), events::reason(&failure.error));
            return Ok(reporter.failed_with(fields, &text, reason, Exit::Failed));
        }
    };
    let seen = survey.summary();
    let devices = seen.device_state.as_ref();
    let blocks: Vec<_> = seen.blocks.iter().map(Block::of).collect();
    let machine_type = seen.configuration.as_ref().map(|found| found.machine_type.as_str());
    let run_state = devices.and_then(DeviceState::run_state);
    let facts = json!({
        "kind": "stream",
        "machine-type": machine_type,
        "run-state": run_state,
        "blocks": blocks,
        "device-state": { "length": devices.map(|state| state.bytes().len()) },
        "devices": devices.map(|state| devices_json(state.devices())),
        "ram": crate::progress::ram(&moved),
    });
    reporter.event("inspected", events::with_exit(facts, Exit::Done));
    let what = if crate::request::is_file(source) {
        "a file of `virsh save`, with QEMU's migration stream"
    } else {
        "a migration stream; its source was informed of a failure and keeps its guest"
    };
    reporter.line(&format!("{}: {what}", args.source));
    print_head(reporter, machine_type, run_state);
    reporter.line(&format!(
        "  memory        {}, {}, {} in all",
        counted(moved.normal, "plain page"),
        counted(moved.duplicate, "zero page"),
        size(moved.transferred)
    ));
    print_blocks(reporter, &blocks);
    if let Some(state) = devices {
        print_devices(reporter, state.devices(), state.bytes().len());
    }
    Ok(Exit::Done)
}

fn devices_json(devices: &[DeviceSection]) -> Value {
    devices
        .iter()
        .map(|device| json!({ "name": device.name, "instance": device.instance, "version": device.version }))
        .collect()
}

fn print_head(reporter: &Reporter, machine_type: Option<&str>, run_state: Option<&str>) {
    reporter.line(&format!("  machine type  {}", machine_type.unwrap_or("unknown").escape_debug()));
    reporter.line(&format!("  run state     {}", run_state.unwrap_or("unknown").escape_debug()));
}

fn print_blocks(reporter: &Reporter, blocks: &[Block<'_>]) {
    reporter.line(&format!("  blocks        {}", blocks.len()));
    for block in blocks {
        let pages = block.pages.map_or_else(String::new, |PageCount { plain, zero }| {
            format!("  {:>11} plain  {:>11} zero", count(plain), count(zero))
        });
        // A stream may name it as it likes.
        let name = block.name.escape_debug().to_string();
        reporter.line(&format!("    {name:<38} {:>11}{pages}", size(block.length)));
    }
}

fn print_devices(reporter: &Reporter, devices: &[DeviceSection], bytes: usize) {
    reporter.line(&format!("  devices       {} in {}", devices.len(), size(bytes as u64)));
    for device in devices {
        let DeviceSection { name, instance, version, .. } = device;
        let name = name.escape_debug().to_string();
        reporter.line(&format!("    {name:<38} instance {instance:<3} version {version}"));
    }
}
