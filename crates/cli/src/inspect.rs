//! `towline inspect`.

mod html;

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use towline_control::plan::{self, AfterCopy, CopyRequest, DiscardSink, Source, Task, TransferOptions};
use towline_control::qemu::Qemu;
use towline_image::manifest::sidecar_path;
use towline_image::{Image, LayerInfo, PageCount, StoredGuest as _};
use towline_migration::Guest as _;
use towline_protocol::device_state::{DeviceSection, DeviceState};
use towline_protocol::{BlockIndex, RamBlock};
use towline_qmp as qmp;

use crate::args::InspectArgs;
#[cfg(feature = "store")]
use crate::events::InspectedStoredImage;
use crate::events::{
    self, Block, FailedPart, FinalEvent, Inspected, InspectedImage, InspectedQemu, InspectedStream, Layer,
    Pages,
};
use crate::exit::{Exit, UsageError};
use crate::progress::Reporter;
use crate::sandbox::Policy;
use crate::signals::{SignalEffects, cancel_on_signals};
use crate::units::{count, counted, size};
use crate::{command_line, errors, sandbox};

/// Number of threads that compare an image with its checksums.
pub(crate) const VERIFY_THREADS: usize = 4;

/// Runs the command.
pub(crate) fn run(args: &InspectArgs) -> Result<Exit> {
    let reporter = Reporter::new(&args.output).blocking();
    let source = args.source.source().map_err(UsageError)?;
    if args.verify && !source.is_image() {
        bail!(UsageError(format!("{}: --verify needs an image", args.source)));
    }
    if let (Some(page), false) = (&args.html, matches!(source, Source::Image(_))) {
        let text = format!("--html {}: {} is not an image file", page.display(), args.source);
        bail!(UsageError(text));
    }
    match policy(args, &source) {
        Some(policy) => args.sandbox.confine(policy),
        None => args.sandbox.log_unconfined(sandbox::EXEC_UNCONFINED),
    }
    match source {
        Source::Image(path) => {
            if let Some(page) = &args.html {
                let base = args.base.as_deref().map(Image::open).transpose()?;
                html::write(page, &Image::open(&path)?, base.as_ref())?;
                reporter.line(&format!("{}: page about {}", page.display(), path.display()));
            }
            image(&reporter, &path, args)
        }
        #[cfg(feature = "store")]
        Source::Store(location) => stored_image(&reporter, &location, args),
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

fn image(reporter: &Reporter, path: &Path, args: &InspectArgs) -> Result<Exit> {
    let image = Image::open(path)?;
    if args.verify {
        image.verify(VERIFY_THREADS, &|_| {})?;
    }
    let allocated = image.file().metadata().with_context(|| path.display().to_string())?.blocks() * 512;
    let chain = image.layers().map(|found| layer(&found)).collect::<Result<Vec<_>>>()?;
    let blocks = stored_blocks(image.ram_blocks(), |block| image.count_pages(block));
    let devices = image.devices();
    let inspected =
        Inspected::Image(Box::new(InspectedImage::new(&image, allocated, &blocks, &chain, args.verify)));
    let exit = reporter.result(FinalEvent::Inspected(inspected), Exit::Done);
    let what = if image.is_incremental() {
        "an incremental image, which towline restores; `towline copy` merges it into a full one for QEMU"
    } else {
        "an image that QEMU 9.0 and later loads (`-incoming file:`, mapped-ram)"
    };
    reporter.line(&format!("{}: {what}", path.display()));
    print_head(reporter, Some(&image.configuration().machine_type), devices.run_state());
    reporter.line(&format!("  file          {} long, {} allocated", size(image.length()), size(allocated)));
    print_manifest(reporter, &image, args);
    command_line::print(reporter, image.origin());
    if image.is_incremental() {
        reporter.line(&format!("  chain         {} images, the full one last", chain.len()));
        chain.iter().for_each(|layer| print_layer(reporter, layer));
    }
    print_blocks(reporter, &blocks);
    print_devices(reporter, devices.devices(), devices.bytes().len());
    Ok(exit)
}

fn print_manifest(reporter: &Reporter, image: &Image, args: &InspectArgs) {
    let Some(manifest) = image.manifest() else {
        reporter.line("  manifest      none, as in images of QEMU itself: no checksums; `towline copy IMAGE NEW` adds them");
        return;
    };
    reporter.line(&format!(
        "  manifest      {}, from {}{}: {}",
        manifest.created,
        manifest.origin.source,
        manifest.origin.qemu.as_ref().map(|qemu| format!(" (QEMU {qemu})")).unwrap_or_default(),
        if args.verify { "every checksum matches" } else { "not compared (--verify)" }
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

fn stored_blocks(blocks: &[RamBlock], pages: impl Fn(BlockIndex) -> PageCount) -> Vec<Block<'_>> {
    let counted = |(index, found)| block(found, Pages::Counted(pages(BlockIndex(index as u32))));
    blocks.iter().enumerate().map(counted).collect()
}

fn block(block: &RamBlock, pages: Pages) -> Block<'_> {
    Block::new(&block.name, block.length, pages)
}

fn layer(layer: &LayerInfo<'_>) -> Result<Layer> {
    let metadata = layer.file.metadata().with_context(|| layer.path.display().to_string())?;
    Ok(Layer::new(layer, metadata.blocks() * 512))
}

fn print_layer(reporter: &Reporter, layer: &Layer) {
    let created = layer.created.as_deref().unwrap_or("unknown");
    let (chunks, allocated) = (counted(layer.chunks_read as u64, "own chunk"), size(layer.allocated));
    reporter.line(&format!("    {:<38} {created}  {chunks:>18}  {allocated:>11} allocated", layer.path));
}

#[cfg(feature = "store")]
fn stored_image(reporter: &Reporter, location: &towline_image::Location, args: &InspectArgs) -> Result<Exit> {
    let cancel = cancel_on_signals(SignalEffects::OF_READING)?;
    let image = towline_image::store::StoredImage::open(location, Some(cancel))?;
    if args.verify {
        image.verify(&|_| {})?;
    }
    let index = image.index();
    let blocks = stored_blocks(image.blocks(), |block| image.count_pages(block));
    let devices = image.devices();
    let chunks = index.all_names().count();
    let inspected = Inspected::StoredImage(InspectedStoredImage::new(location, &image, &blocks, args.verify));
    let exit = reporter.result(FinalEvent::Inspected(inspected), Exit::Done);
    reporter.line(&format!("{location}: an image in an object store; QEMU loads a copy in a file"));
    print_head(reporter, Some(&image.configuration().machine_type), devices.run_state());
    reporter.line(&format!(
        "  chunks        {} of {}, named by an index of {}: {}",
        count(chunks as u64),
        size(index.chunk_bytes),
        size(image.index_bytes()),
        if args.verify { "complete, and every checksum matches" } else { "not compared (--verify)" }
    ));
    let qemu = index.origin.qemu.as_ref().map(|qemu| format!(" (QEMU {qemu})")).unwrap_or_default();
    reporter.line(&format!("  created       {}, from {}{qemu}", index.created, index.origin.source));
    command_line::print(reporter, image.origin());
    print_blocks(reporter, &blocks);
    print_devices(reporter, devices.devices(), devices.bytes().len());
    Ok(exit)
}

fn qemu(reporter: &Reporter, path: &Path) -> Result<Exit> {
    let qemu = Qemu::inspect(path, &qmp::Options::default())?;
    let facts = qemu.facts();
    let blocks: Vec<_> = facts
        .migrated_blocks()
        .map(|block| Block::new(&block.name, block.used_bytes, Pages::OfSize { page_size: block.page_bytes }))
        .collect();
    let on: Vec<_> =
        facts.capabilities.iter().filter(|(_, on)| **on).map(|(name, _)| name.as_str()).collect();
    let inspected = Inspected::Qemu(InspectedQemu::new(&qemu, &on, &blocks));
    let exit = reporter.result(FinalEvent::Inspected(inspected), Exit::Done);
    reporter.line(&format!("{}: QEMU {}", qemu.socket(), qemu.version_text()));
    print_head(reporter, Some(&facts.machine), Some(facts.status.status.as_str()));
    reporter.line(&format!("  uuid          {}", facts.uuid));
    reporter.line(&format!("  capabilities  {}", if on.is_empty() { "none".into() } else { on.join(", ") }));
    match facts.blocked_reasons() {
        [] => reporter.line("  migration     not blocked"),
        reasons => reporter.line(&format!("  migration     blocked: {}", reasons.join("; "))),
    }
    print_blocks(reporter, &blocks);
    Ok(exit)
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
            let about = FailedPart::Notes { notes: &failure.notes };
            let (text, reason) = (errors::worded(&failure), events::reason(&failure.error));
            return Ok(reporter.failed_with(about, &text, reason, Exit::Failed));
        }
    };
    let seen = survey.summary();
    let devices = seen.device_state.as_ref();
    let blocks: Vec<_> = seen.blocks.iter().map(|found| block(found, Pages::Unknown {})).collect();
    let machine_type = seen.configuration.as_ref().map(|found| found.machine_type.as_str());
    let run_state = devices.and_then(DeviceState::run_state);
    let inspected = Inspected::Stream(InspectedStream::new(&seen, &blocks, &moved));
    let exit = reporter.result(FinalEvent::Inspected(inspected), Exit::Done);
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
    Ok(exit)
}

fn print_head(reporter: &Reporter, machine_type: Option<&str>, run_state: Option<&str>) {
    reporter.line(&format!("  machine type  {}", machine_type.unwrap_or("unknown").escape_debug()));
    reporter.line(&format!("  run state     {}", run_state.unwrap_or("unknown").escape_debug()));
}

fn print_blocks(reporter: &Reporter, blocks: &[Block<'_>]) {
    reporter.line(&format!("  blocks        {}", blocks.len()));
    for block in blocks {
        let pages = match block.pages {
            Pages::Counted(PageCount { plain, zero }) => {
                format!("  {:>11} plain  {:>11} zero", count(plain), count(zero))
            }
            Pages::OfSize { .. } | Pages::Unknown {} => String::new(),
        };
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
