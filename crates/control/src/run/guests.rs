//! The guests of one run: their names, their command lines, and where their memory comes from. Nothing is
//! started here.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Mutex;

use towline_image::{Image, Origin, StoredDisk};
use towline_launch::command_line::QemuOption;
use towline_launch::{
    AllowedCommandLine, CommandLine, GuestIdentity, GuestName, HostArguments, Lifetime, MappedBlock,
    MappedMemory, Overlay, OverlayPlan, ParseError, QemuVersion, Recorded, Refused, SeparateNetworks,
    Sharing, Start, check_in_use,
};
use towline_protocol::RamBlock;

use super::image::RunImage;
use super::options::{CommandLineTrust, Disks, Error, MemoryRequest, Networks, RunOptions};
use crate::in_place::Reflink;
use crate::plan::is_same_file;

/// A guest that is about to start.
#[derive(Debug)]
pub struct GuestStart {
    /// Name of the guest.
    pub name: GuestName,
    /// Number of the clone.
    pub(super) n: u32,
    pub(super) host: HostArguments,
    pub(super) command_line: AllowedCommandLine,
    /// Overlays that must be made first.
    pub(super) overlays: Vec<Overlay>,
    /// The image's reflink that is its memory, if devices of other processes share that, until its only guest uses it.
    pub(super) reflink: Mutex<Option<Reflink>>,
    /// Networks whose link is down when it begins to run.
    pub(super) links_down: Vec<String>,
}

/// Origin of the guests' memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemoryOrigin {
    /// Mapped from the image.
    Mapped,
    /// Mapped from a reflink of the image.
    Reflink,
    /// Copied, for this reason; `None`: as requested.
    Copied(Option<String>),
    /// Follows the guest, which runs at once.
    Postcopy,
}

/// The guests of one run.
#[derive(Debug)]
pub(super) struct PlannedGuests {
    pub(super) starts: Vec<GuestStart>,
    pub(super) memory: MemoryOrigin,
    pub(super) notices: Vec<Notice>,
}

/// Notice for the user before the guests start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// The only guest has a network card, which sends with the stored guest's MAC address.
    NetworkCard,
    /// These networks are connected to nothing.
    LinksDown(Vec<String>),
    /// Memory is copied, for this reason.
    MemoryIsCopied(String),
    /// A balloon gives nothing back of memory that is mapped.
    Balloon,
    /// QEMU's own network is isolated; the key of the option that opens it, if it has one.
    IsolatedNetwork(Option<String>),
    /// The names of guests that outlive this process are lost when its user logs out.
    NamesEndWithSession,
}

impl GuestStart {
    pub(super) fn new(
        options: &RunOptions,
        recorded: Option<&Recorded>,
        n: u32,
        name: GuestName,
        given: &HostArguments,
    ) -> Result<Self, Error> {
        let host = given.for_guest(GuestIdentity { n, name: name.as_str() })?;
        // The user's own settings follow, and replace these.
        let ids = recorded.map(Recorded::new_generation_ids).unwrap_or_default();
        let networks = recorded.filter(|_| options.networks == Networks::Separate);
        let networks = networks.map(|recorded| recorded.separate_networks(&host.settings)).transpose()?;
        let SeparateNetworks { settings, unconnected: links_down } = networks.unwrap_or_default();
        let settings = ids.into_iter().chain(settings).chain(host.settings).collect();
        // It is used unchanged, even with braces.
        let working_directory = given.working_directory.clone();
        let host = HostArguments { settings, working_directory, ..host };
        let command_line = match (recorded, options.trust) {
            (Some(recorded), CommandLineTrust::Trusted) => recorded.trust(&host)?,
            (Some(recorded), CommandLineTrust::Untrusted) => recorded.allow(&host)?,
            (None, _) => {
                let own = CommandLine::parse(&host.arguments).map_err(Refused::Argument)?;
                own.accept(&HostArguments { arguments: Vec::new(), ..host.clone() })?
            }
        };
        Ok(Self { name, n, host, command_line, overlays: Vec::new(), reflink: Mutex::default(), links_down })
    }

    /// Has it map its memory from another image of the same guest.
    pub(super) fn map_from(&mut self, image: &RunImage, version: Option<QemuVersion>) -> Result<(), Error> {
        let Some((image, version)) = image.file().zip(version) else { return Ok(()) };
        let (command_line, reflink) = mapped(image, &self.command_line, version)
            .map_err(|reason| Error::NotMapped { image: image.path().to_owned(), reason })?;
        (self.command_line, self.reflink) = (command_line, Mutex::new(reflink));
        Ok(())
    }

    /// Program and arguments of its QEMU for people, without secrets. The launcher adds its monitor,
    /// `-incoming`, `-sandbox` and `-name`.
    pub fn shown_command(&self) -> Vec<OsString> {
        let program = self.host.binary.clone().into_os_string();
        std::iter::once(program).chain(self.command_line.to_shown_arguments()).collect()
    }
}

/// Returns the command line that is recorded with an image; `None` if there is none.
///
/// # Errors
/// The text is not one, or of a newer version.
pub fn recorded_command_line(origin: &Origin) -> Result<Option<Recorded>, ParseError> {
    let process = origin.process.as_ref();
    process.map(|process| Recorded::from_json(process.command_line.as_bytes())).transpose()
}

/// Returns the guests to start: their memory is not mapped without the QEMU's `version`. They do not collide
/// with each other or with this host.
pub(super) fn plan(
    options: &RunOptions,
    image: &RunImage,
    host: &HostArguments,
    version: Option<QemuVersion>,
) -> Result<PlannedGuests, Error> {
    let recorded = image.origin.as_ref().map(recorded_command_line).transpose()?.flatten();
    if recorded.is_none() && options.host.arguments.is_empty() {
        return Err(Error::NoCommandLine { image: image.name.display().to_string() });
    }
    let numbered = (0..).zip(names(options, &image.stem)?);
    let start = |(n, name)| GuestStart::new(options, recorded.as_ref(), n, name, host);
    let mut starts = numbered.map(start).collect::<Result<Vec<_>, _>>()?;
    check_disks(options, image, &starts)?;
    if let Disks::Overlays(directory) = &options.disks {
        use_overlays(directory.as_deref().unwrap_or(&image.directory), &mut starts)?;
    }
    image.plan_snapshots(starts.first().map_or(&[], |guest| &guest.overlays))?;
    let memory = map_memory(options.memory, image, version, &mut starts)?;
    let checked: Vec<_> = starts
        .iter()
        .map(|guest| Start { name: guest.name.as_str(), command_line: &guest.command_line })
        .collect();
    check_in_use(&checked)?;
    let notices = notices(options, &starts, &memory);
    Ok(PlannedGuests { starts, memory, notices })
}

/// The names of the guests, numbered if there are several.
pub(super) fn names(options: &RunOptions, stem: &str) -> Result<Vec<GuestName>, Error> {
    let base = options.name.as_ref().map_or(stem, GuestName::as_str);
    let names = match options.count {
        1 => vec![base.to_owned()],
        count => (0..count).map(|n| format!("{base}-{n}")).collect(),
    };
    names.iter().map(|name| Ok(name.parse()?)).collect()
}

/// Refuses disks that were kept at the guest's instant, if they have changed since, or if these guests would write to them.
fn check_disks(options: &RunOptions, image: &RunImage, guests: &[GuestStart]) -> Result<(), Error> {
    let process = image.origin.as_ref().and_then(|origin| origin.process.as_ref());
    let stored = process.map_or(&[][..], |process| &process.disks);
    for guest in guests.iter().filter(|_| !stored.is_empty()) {
        let directory = guest.host.working_directory.as_deref().unwrap_or(Path::new("/"));
        for Overlay { setting, base: file, .. } in guest.command_line.whole().written_disks(directory, None) {
            let is_it =
                |disk: &&StoredDisk| disk.file == file || is_same_file(disk.file.as_ref(), file.as_ref());
            let Some(disk) = stored.iter().find(is_it) else { continue };
            let image = image.name.display().to_string();
            if options.disks == Disks::Own {
                return Err(Error::BackingFile { image, setting, file });
            }
            if StoredDisk::of(&disk.file) != *disk {
                return Err(Error::OtherInstant { image, setting, file });
            }
        }
    }
    Ok(())
}

/// Has the guests write to overlays of their disks, which are not made yet.
fn use_overlays(directory: &Path, guests: &mut [GuestStart]) -> Result<(), Error> {
    // Backing files are named in overlays, whose directory is another one.
    let directory = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
    for guest in guests.iter_mut() {
        let plan = OverlayPlan {
            guest: &guest.name,
            directory: &directory,
            working_directory: guest.host.working_directory.as_deref().unwrap_or(Path::new("/")),
        };
        guest.overlays = guest.command_line.use_overlays(&plan)?;
    }
    let all: Vec<_> = guests.iter().flat_map(|guest| guest.overlays.iter().cloned()).collect();
    Ok(Overlay::check(&all)?)
}

/// Has the guests map their memory from the image, if that is requested and possible.
fn map_memory(
    request: MemoryRequest,
    image: &RunImage,
    version: Option<QemuVersion>,
    guests: &mut [GuestStart],
) -> Result<MemoryOrigin, Error> {
    let from = image.file().zip(version).filter(|_| request.is_mapped());
    let Some((image, version)) = from else {
        return Ok(match request {
            MemoryRequest::Copied => MemoryOrigin::Copied(None),
            _ => MemoryOrigin::Postcopy,
        });
    };
    let all = guests.iter().map(|guest| mapped(image, &guest.command_line, version));
    match all.collect::<Result<Vec<_>, _>>() {
        Ok(mapped) => {
            let has_reflinks = mapped.iter().any(|(_, reflink)| reflink.is_some());
            for (guest, (command_line, reflink)) in guests.iter_mut().zip(mapped) {
                (guest.command_line, guest.reflink) = (command_line, Mutex::new(reflink));
            }
            Ok(if has_reflinks { MemoryOrigin::Reflink } else { MemoryOrigin::Mapped })
        }
        Err(reason) if request == MemoryRequest::Mapped => {
            Err(Error::NotMapped { image: image.path().to_owned(), reason })
        }
        Err(reason) => Ok(MemoryOrigin::Copied(Some(reason.to_string()))),
    }
}

/// Has a guest map its memory: from the image, or from a reflink of it that its devices share.
fn mapped(
    image: &Image,
    guest: &AllowedCommandLine,
    version: QemuVersion,
) -> Result<(AllowedCommandLine, Option<Reflink>), Box<dyn std::error::Error + Send + Sync>> {
    // Of an increment the base; what differs is sent.
    let image = image.whole();
    // The user's own arguments too: they may bring a backend or such a device.
    let whole = guest.whole();
    let made = whole.options().iter().any(is_vhost_user).then(|| Reflink::create(image));
    let why = "vhost-user devices share the guest's memory, which needs its own file";
    let reflink = made.transpose().map_err(|error| format!("{why}: {error}"))?;
    let (path, sharing) = match &reflink {
        Some(reflink) => (reflink.path().to_owned(), Sharing::Shared),
        None => (image.path().canonicalize()?, Sharing::CopyOnWrite),
    };
    let mut command_line = guest.clone();
    let memory = MappedMemory { blocks: blocks(image, &whole, &path)?, sharing };
    memory.apply(&mut command_line, version)?;
    Ok((command_line, reflink))
}

/// Names of the blocks that are the guest's RAM, of blocks with these names and lengths.
pub(crate) fn main_memory<'a>(
    blocks: impl Iterator<Item = (&'a str, u64)> + Clone,
    whole: &CommandLine,
) -> Result<Vec<String>, String> {
    let backends = whole.memory_backends();
    if backends.is_empty() {
        // The machine's own memory is the largest block by far; others are firmware and video memory.
        let main = blocks.max_by_key(|(_, length)| *length).filter(|(name, _)| name.ends_with(".ram"));
        let (name, _) = main.ok_or("no block of the guest is the machine's memory")?;
        return Ok(vec![name.to_owned()]);
    }
    match backends.iter().find(|id| !blocks.clone().any(|(name, _)| name == id.as_str())) {
        Some(id) => Err(format!("the guest has no block of the memory backend {id}")),
        None => Ok(backends),
    }
}

/// The guest's memory, block by block, as ranges of `file`, which is the image or its reflink.
fn blocks(image: &Image, whole: &CommandLine, file: &Path) -> Result<Vec<MappedBlock>, String> {
    let blocks = image.ram_blocks();
    let main = main_memory(blocks.iter().map(|block| (block.name.as_str(), block.length)), whole)?;
    let mapped = main.iter().filter_map(|name| blocks.iter().find(|block| block.name == *name));
    let range = |block: &RamBlock| {
        let position = block.mapped.ok_or("the image's blocks have no position")?;
        let (id, path) = (block.name.clone(), file.to_owned());
        Ok(MappedBlock { id, path, offset: position.pages_offset, length: block.length })
    };
    mapped.map(range).collect()
}

pub(super) fn is_vhost_user(option: &QemuOption) -> bool {
    let Some(properties) = option.properties() else { return false };
    let value = |key: &str| properties.value(key).unwrap_or_default();
    match option.name.as_str() {
        "netdev" => value("type") == "vhost-user",
        "device" => value("driver").starts_with("vhost-user"),
        _ => false,
    }
}

/// Notices for the user of these guests.
fn notices(options: &RunOptions, starts: &[GuestStart], memory: &MemoryOrigin) -> Vec<Notice> {
    let Some(GuestStart { command_line, links_down, .. }) = starts.first() else { return Vec::new() };
    let mut notices = Vec::new();
    if !links_down.is_empty() {
        notices.push(Notice::LinksDown(links_down.clone()));
    } else if starts.len() == 1 && has_card(command_line) {
        notices.push(Notice::NetworkCard);
    }
    if let MemoryOrigin::Copied(Some(reason)) = memory {
        notices.push(Notice::MemoryIsCopied(reason.clone()));
    }
    if *memory == MemoryOrigin::Mapped && has_balloon(command_line) {
        notices.push(Notice::Balloon);
    }
    if options.trust == CommandLineTrust::Untrusted {
        notices.extend(isolated_networks(command_line).into_iter().map(Notice::IsolatedNetwork));
    }
    if options.lifetime == Lifetime::Detached && options.root.ends_with_session() {
        notices.push(Notice::NamesEndWithSession);
    }
    notices
}

/// Returns true if the guest has a network card with a network.
fn has_card(guest: &AllowedCommandLine) -> bool {
    guest.whole().options().iter().any(|option| match option.name.as_str() {
        "device" => option.property("netdev").is_some(),
        "nic" => option.value_text().as_deref() != Some("none"),
        _ => false,
    })
}

/// Keys of QEMU's own networks, which are isolated unless this host says otherwise; one of QEMU's defaults
/// has none.
fn isolated_networks(guest: &AllowedCommandLine) -> Vec<Option<String>> {
    let line = guest.command_line();
    let is_isolated = |option: &QemuOption| {
        let value = |key| option.property(key).unwrap_or_default();
        option.name.is_network() && value("type") == "user" && value("restrict") == "on"
    };
    let keys = line.options().iter().zip(line.setting_keys()).filter(|(option, _)| is_isolated(option));
    keys.map(|(option, key)| (option.name.as_str() != "net").then_some(key)).collect()
}

/// Returns true if the guest has a balloon.
fn has_balloon(guest: &AllowedCommandLine) -> bool {
    let driver = |option: &QemuOption| option.property("driver");
    guest.command_line().named("device").filter_map(driver).any(|driver| driver.starts_with("virtio-balloon"))
}
