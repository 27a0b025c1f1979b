//! The guests of one `run`: their names, their command lines, and where their memory comes from. Nothing is started here.

use std::path::Path;

use towline_control::command_line;
use towline_control::in_place::{Reflink, UnusedReflink};
use towline_image::Image;
use towline_launch::command_line::QemuOption;
use towline_launch::{
    AllowedCommandLine, CommandLine, GuestIdentity, GuestName, HostArguments, MappedBlock, MappedMemory,
    Overlay, OverlayPlan, QemuVersion, Recorded, Refused, Sharing, Start, check_in_use,
};
use towline_protocol::RamBlock;

use super::image::RunImage;
use super::rejection::Rejection;

use crate::args::RunArgs;

/// A guest that is about to start.
#[derive(Debug)]
pub(crate) struct GuestStart {
    pub(crate) name: GuestName,
    pub(crate) host: HostArguments,
    pub(crate) command_line: AllowedCommandLine,
    /// Overlays that have to be made first.
    pub(crate) overlays: Vec<Overlay>,
    /// The image's reflink that is its memory, if devices of other processes share that.
    pub(crate) reflink: Option<UnusedReflink>,
}

/// Origin of the guests' memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MemoryOrigin {
    /// It is mapped from the image.
    Mapped,
    /// It is mapped from a reflink of the image.
    Reflink,
    /// It is copied, for this reason; `None`: as requested.
    Copied(Option<String>),
    /// It follows the guest, which runs at once.
    Postcopy,
}

impl MemoryOrigin {
    /// Its identifier in events.
    pub(crate) fn id(&self) -> &'static str {
        match self {
            Self::Mapped => "mapped",
            Self::Reflink => "reflink",
            Self::Copied(_) => "copied",
            Self::Postcopy => "postcopy",
        }
    }
}

/// Returns the guests to start, and their memory's origin: it is not mapped without the QEMU's `version`. They do not collide with each
/// other or with this host.
pub(crate) fn guests(
    args: &RunArgs,
    image: &RunImage,
    version: Option<QemuVersion>,
) -> Result<(Vec<GuestStart>, MemoryOrigin), Rejection> {
    let recorded = match image.origin().map(command_line::recorded) {
        Some(recorded) => recorded.map_err(|error| Rejection::of_command_line(&error))?,
        None => None,
    };
    if recorded.is_none() && args.arguments.is_empty() {
        return Err(Rejection::usage(format!(
            "image {} has no command line; write all arguments of its QEMU after --",
            image.name().display()
        )));
    }
    let mut guests = Vec::new();
    for (n, name) in (0..).zip(names(args, &image.stem)?) {
        let host = host(args, recorded.as_ref(), n, &name)?;
        let command_line = allowed(args, recorded.as_ref(), &host);
        let command_line = command_line.map_err(|refused| Rejection::refused_options(&refused))?;
        guests.push(GuestStart { name, host, command_line, overlays: Vec::new(), reflink: None });
    }
    if args.overlay {
        use_overlays(args, image, &mut guests)?;
    }
    let memory = map_memory(args, image, version, &mut guests)?;
    let starts: Vec<_> = guests
        .iter()
        .map(|guest| Start { name: guest.name.as_str(), command_line: &guest.command_line })
        .collect();
    check_in_use(&starts).map_err(|error| Rejection::refused(&error))?;
    Ok((guests, memory))
}

/// The names of the guests, numbered if there are several.
fn names(args: &RunArgs, stem: &str) -> Result<Vec<GuestName>, Rejection> {
    let base = args.name.as_ref().map_or(stem, GuestName::as_str);
    let names = match args.count {
        1 => vec![base.to_owned()],
        count => (0..count).map(|n| format!("{base}-{n}")).collect(),
    };
    names.iter().map(|name| name.parse().map_err(|error| Rejection::usage(format!("{error}")))).collect()
}

/// This host's part of the command line of one guest.
fn host(
    args: &RunArgs,
    recorded: Option<&Recorded>,
    n: u32,
    name: &GuestName,
) -> Result<HostArguments, Rejection> {
    // The user's own settings follow, and replace these.
    let ids = recorded.map(Recorded::new_generation_ids).unwrap_or_default();
    let host = HostArguments {
        binary: args.qemu.clone(),
        settings: ids.into_iter().chain(args.set.iter().cloned()).collect(),
        arguments: args.arguments.clone(),
        ..HostArguments::default()
    };
    let identity = GuestIdentity { n, name: name.as_str() };
    let host = host.for_guest(identity).map_err(|error| Rejection::usage(error.to_string()))?;
    // Of relative paths of the user's arguments. It is as it is, whatever braces it has.
    Ok(HostArguments { working_directory: std::env::current_dir().ok(), ..host })
}

fn allowed(
    args: &RunArgs,
    recorded: Option<&Recorded>,
    host: &HostArguments,
) -> Result<AllowedCommandLine, Refused> {
    match recorded {
        Some(recorded) if args.trust_command_line => recorded.trust(host),
        Some(recorded) => recorded.allow(host),
        None => {
            let own = CommandLine::parse(&host.arguments).map_err(Refused::Argument)?;
            own.accept(&HostArguments { arguments: Vec::new(), ..host.clone() })
        }
    }
}

/// Has the guests write to overlays of their disks, which are not made yet.
fn use_overlays(args: &RunArgs, image: &RunImage, guests: &mut [GuestStart]) -> Result<(), Rejection> {
    let directory = args.overlay_dir.clone().unwrap_or_else(|| image.directory());
    // Backing files are named in overlays, whose directory is another one.
    let directory = std::path::absolute(&directory).unwrap_or(directory);
    for guest in guests.iter_mut() {
        let plan = OverlayPlan {
            guest: &guest.name,
            directory: &directory,
            working_directory: guest.host.working_directory.as_deref().unwrap_or(Path::new("/")),
        };
        let overlays = guest.command_line.use_overlays(&plan);
        guest.overlays = overlays.map_err(|error| Rejection::refused(&error))?;
    }
    let all: Vec<_> = guests.iter().flat_map(|guest| guest.overlays.iter().cloned()).collect();
    Overlay::check(&all).map_err(|error| Rejection::refused(&error))
}

/// Has the guests map their memory from the image, if that is requested and possible.
fn map_memory(
    args: &RunArgs,
    image: &RunImage,
    version: Option<QemuVersion>,
    guests: &mut [GuestStart],
) -> Result<MemoryOrigin, Rejection> {
    if args.copy {
        return Ok(MemoryOrigin::Copied(None));
    }
    let mapped = image.file().zip(version).filter(|_| !args.postcopy);
    let Some((image, version)) = mapped else { return Ok(MemoryOrigin::Postcopy) };
    let mapped: Result<Vec<_>, String> =
        guests.iter().map(|guest| mapped_guest(image, &guest.command_line, version)).collect();
    match mapped {
        Ok(mapped) => {
            for (guest, mapped) in guests.iter_mut().zip(mapped) {
                (guest.command_line, guest.reflink) = (mapped.command_line, mapped.reflink);
            }
            let has_reflinks = guests.iter().any(|guest| guest.reflink.is_some());
            Ok(if has_reflinks { MemoryOrigin::Reflink } else { MemoryOrigin::Mapped })
        }
        Err(reason) if args.share => Err(Rejection::refused(&format!(
            "memory cannot be mapped from {}: {reason}; leave --share out, and it is copied",
            image.path().display()
        ))),
        Err(reason) => Ok(MemoryOrigin::Copied(Some(reason))),
    }
}

/// A guest whose memory is mapped.
struct MappedGuest {
    command_line: AllowedCommandLine,
    reflink: Option<UnusedReflink>,
}

/// Has a guest map its memory: from the image, or from a reflink of it that its devices share.
fn mapped_guest(
    image: &Image,
    guest: &AllowedCommandLine,
    version: QemuVersion,
) -> Result<MappedGuest, String> {
    if image.is_incremental() {
        return Err("the image is an increment; make a whole one with `towline copy IMAGE NEW`".into());
    }
    // The user's own arguments too: they may bring a backend or such a device.
    let whole = CommandLine::parse(guest.to_arguments()).map_err(|error| error.to_string())?;
    let reflink = match whole.options().iter().any(is_vhost_user) {
        true => {
            let made = Reflink::create(image);
            let why = "vhost-user devices share the guest's memory, which needs a file of its own";
            Some(made.map_err(|error| format!("{why}: {error}"))?)
        }
        false => None,
    };
    let (path, sharing) = match &reflink {
        Some(reflink) => (reflink.path().to_owned(), Sharing::Shared),
        None => (image.path().canonicalize().map_err(|error| error.to_string())?, Sharing::CopyOnWrite),
    };
    let mut command_line = guest.clone();
    let memory = MappedMemory { blocks: blocks(image, &whole, &path)?, sharing };
    memory.apply(&mut command_line, version).map_err(|error| error.to_string())?;
    Ok(MappedGuest { command_line, reflink: reflink.map(UnusedReflink::new) })
}

/// The guest's memory, block by block, as ranges of `file`, which is the image or its reflink.
fn blocks(image: &Image, whole: &CommandLine, file: &Path) -> Result<Vec<MappedBlock>, String> {
    let blocks = image.ram_blocks();
    let backends = backends(whole);
    let mapped: Vec<_> = if backends.is_empty() {
        // The machine's own memory is the largest block by far; others are firmware and video memory.
        let main =
            blocks.iter().max_by_key(|block| block.length).filter(|block| block.name.ends_with(".ram"));
        vec![main.ok_or("no block of the image is the machine's memory")?]
    } else {
        let find = |id: &String| {
            let block = blocks.iter().find(|block| block.name == *id);
            block.ok_or_else(|| format!("the image has no block of the memory backend {id}"))
        };
        backends.iter().map(find).collect::<Result<_, _>>()?
    };
    let range = |block: &RamBlock| {
        let position = block.mapped.ok_or("the image's blocks have no position")?;
        let (id, path) = (block.name.clone(), file.to_owned());
        Ok(MappedBlock { id, path, offset: position.pages_offset, length: block.length })
    };
    mapped.into_iter().map(range).collect()
}

/// Returns true if the guest has a network card with a network.
pub(crate) fn has_card(guest: &AllowedCommandLine) -> bool {
    let Ok(whole) = CommandLine::parse(guest.to_arguments()) else { return false };
    whole.options().iter().any(|option| match option.name.as_str() {
        "device" => option.properties().is_some_and(|properties| properties.value("netdev").is_some()),
        "nic" => option.value_text().as_deref() != Some("none"),
        _ => false,
    })
}

/// Settings that open QEMU's own networks, which are isolated unless this host says otherwise; one of QEMU's defaults has none.
pub(crate) fn isolated_networks(guest: &AllowedCommandLine) -> Vec<String> {
    let line = guest.command_line();
    let is_isolated = |option: &QemuOption| {
        let value =
            |key| option.properties().and_then(|properties| properties.value(key)).unwrap_or_default();
        ["net", "netdev", "nic"].contains(&option.name.as_str())
            && value("type") == "user"
            && value("restrict") == "on"
    };
    let keys = line.options().iter().zip(line.setting_keys()).filter(|(option, _)| is_isolated(option));
    keys.map(|(option, key)| match option.name.as_str() {
        "net" => "-- -nic user".to_owned(),
        _ => format!("--set {key}.restrict=off"),
    })
    .collect()
}

/// Returns true if the guest has a balloon.
pub(crate) fn has_balloon(guest: &AllowedCommandLine) -> bool {
    let driver = |option: &QemuOption| option.properties()?.value("driver");
    let drivers = guest.command_line().named("device").filter_map(driver);
    drivers.into_iter().any(|driver| driver.starts_with("virtio-balloon"))
}

/// Ids of the backends that are the guest's memory: the machine's, and those of its NUMA nodes. Others are of devices.
fn backends(command_line: &CommandLine) -> Vec<String> {
    let main = command_line.merged_value("machine", "memory-backend");
    let nodes = command_line.named("numa").filter_map(|option| option.properties()?.value("memdev"));
    main.into_iter().chain(nodes).collect()
}

fn is_vhost_user(option: &QemuOption) -> bool {
    let Some(properties) = option.properties() else { return false };
    let value = |key: &str| properties.value(key).unwrap_or_default();
    match option.name.as_str() {
        "netdev" => value("type") == "vhost-user",
        "device" => value("driver").starts_with("vhost-user"),
        _ => false,
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
