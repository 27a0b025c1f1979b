//! The guests of one `run`: their names, their command lines, and where their memory comes from. Nothing is started here.

use std::path::Path;

use towline_control::command_line;
use towline_image::{Image, StoredGuest as _};
use towline_launch::{
    AllowedCommandLine, CommandLine, GuestIdentity, GuestName, HostArguments, MappedBlock, MappedMemory,
    QemuVersion, Recorded, Refused, Sharing, Start, check_in_use,
};

use crate::args::RunArgs;
use crate::exit::Exit;

/// A guest that is about to start.
#[derive(Debug)]
pub(crate) struct GuestStart {
    pub(crate) name: GuestName,
    pub(crate) host: HostArguments,
    pub(crate) command_line: AllowedCommandLine,
}

/// Origin of the guests' memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Memory {
    /// It is mapped from the image.
    Mapped,
    /// It is copied, for this reason; `None`: as requested.
    Copied(Option<String>),
}

/// A `run` that is not started.
#[derive(Debug)]
pub(crate) struct Rejection {
    pub(crate) exit: Exit,
    pub(crate) text: String,
}

impl Rejection {
    fn usage(text: impl Into<String>) -> Self {
        Self { exit: Exit::Usage, text: text.into() }
    }

    fn refused(error: &dyn std::fmt::Display) -> Self {
        Self { exit: Exit::Failed, text: error.to_string() }
    }
}

/// Returns the guests to start, and their memory's origin. They do not collide with each other or with this host.
pub(crate) fn guests(
    args: &RunArgs,
    image: &Image,
    version: QemuVersion,
) -> Result<(Vec<GuestStart>, Memory), Rejection> {
    let recorded = match image.origin().map(command_line::recorded) {
        Some(recorded) => recorded.map_err(|error| Rejection::refused(&error))?,
        None => None,
    };
    if recorded.is_none() && args.arguments.is_empty() {
        return Err(Rejection::usage(format!(
            "image {} has no command line; write all arguments of its QEMU after --",
            image.path().display()
        )));
    }
    let mut guests = Vec::new();
    for (n, name) in (0..).zip(names(args, image.path())?) {
        let host = host(args, n, &name)?;
        let command_line = allowed(args, recorded.as_ref(), &host);
        let command_line = command_line.map_err(|refused| Rejection::refused(&refused))?;
        guests.push(GuestStart { name, host, command_line });
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
fn names(args: &RunArgs, image: &Path) -> Result<Vec<GuestName>, Rejection> {
    let base = match &args.name {
        Some(name) => name.as_str().to_owned(),
        None => image.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
    };
    let names = match args.count {
        1 => vec![base],
        count => (0..count).map(|n| format!("{base}-{n}")).collect(),
    };
    names.iter().map(|name| name.parse().map_err(|error| Rejection::usage(format!("{error}")))).collect()
}

/// This host's part of the command line of one guest.
fn host(args: &RunArgs, n: u32, name: &GuestName) -> Result<HostArguments, Rejection> {
    let host = HostArguments {
        binary: args.qemu.clone(),
        // Relative paths of the user's arguments.
        working_directory: std::env::current_dir().ok(),
        settings: args.set.clone(),
        arguments: args.arguments.clone(),
        ..HostArguments::default()
    };
    let identity = GuestIdentity { n, name: name.as_str() };
    host.for_guest(identity).map_err(|error| Rejection::usage(error.to_string()))
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

/// Has the guests map their memory from the image, if that is requested and possible.
fn map_memory(
    args: &RunArgs,
    image: &Image,
    version: QemuVersion,
    guests: &mut [GuestStart],
) -> Result<Memory, Rejection> {
    if args.copy {
        return Ok(Memory::Copied(None));
    }
    let mapped = guests.iter().try_fold(Vec::new(), |mut mapped, guest| {
        let mut command_line = guest.command_line.clone();
        let block = block(image, &command_line)?;
        let memory = MappedMemory { blocks: vec![block], sharing: Sharing::CopyOnWrite };
        memory.apply(&mut command_line, version).map_err(|error| error.to_string())?;
        mapped.push(command_line);
        Ok::<_, String>(mapped)
    });
    match mapped {
        Ok(mapped) => {
            guests.iter_mut().zip(mapped).for_each(|(guest, mapped)| guest.command_line = mapped);
            Ok(Memory::Mapped)
        }
        Err(reason) if args.share => Err(Rejection::refused(&format!(
            "memory cannot be mapped from {}: {reason}; leave --share out, and it is copied",
            image.path().display()
        ))),
        Err(reason) => Ok(Memory::Copied(Some(reason))),
    }
}

/// The guest's only block of memory, as a range of the image.
fn block(image: &Image, guest: &AllowedCommandLine) -> Result<MappedBlock, String> {
    if image.is_incremental() {
        return Err("the image is an increment; make a whole one with `towline copy IMAGE NEW`".into());
    }
    // The user's own arguments too: they may bring a backend or such a device.
    let whole = CommandLine::parse(guest.to_arguments()).map_err(|error| error.to_string())?;
    if whole.options().iter().any(is_vhost_user) {
        return Err("vhost-user devices need memory that is shared with their process".into());
    }
    let backends: Vec<_> = whole.named("object").filter_map(backend_id).collect();
    let blocks = image.ram_blocks();
    let block = match backends.as_slice() {
        // The machine's own memory is the largest block by far; others are firmware and video memory.
        [] => blocks.iter().max_by_key(|block| block.length).filter(|block| block.name.ends_with(".ram")),
        [id] => blocks.iter().find(|block| block.name == *id),
        several => return Err(format!("the guest has {} memory backends, expected one", several.len())),
    };
    let block = block.ok_or("no block of the image is the guest's memory backend")?;
    let position = block.mapped.ok_or("the image's blocks have no position")?;
    let path = image.path().canonicalize().map_err(|error| error.to_string())?;
    Ok(MappedBlock { id: block.name.clone(), path, offset: position.pages_offset, length: block.length })
}

fn backend_id(option: &towline_launch::command_line::QemuOption) -> Option<String> {
    let kind = option.properties()?.value("qom-type")?;
    kind.starts_with("memory-backend-").then(|| option.id())?
}

fn is_vhost_user(option: &towline_launch::command_line::QemuOption) -> bool {
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
