//! The pairs: properties of the source and of the destination, and the expected outcome.

use std::path::Path;

use towline_lab::{BootSector, Builder, Qemu, Version};

use crate::files::Disks;

/// A pair of QEMUs.
pub(crate) struct Pair {
    pub(crate) name: &'static str,
    pub(crate) source: Builder,
    pub(crate) destination: Builder,
    /// Outcome of stock QEMU's migration, as observed; the test checks it again.
    pub(crate) runs: bool,
    /// Part of `make test`.
    pub(crate) is_short: bool,
    /// Capabilities and parameters, as `+multifd` and `multifd-channels=4`.
    pub(crate) source_settings: &'static [&'static str],
    pub(crate) destination_settings: &'static [&'static str],
    /// A QEMU beside them.
    pub(crate) third: Option<Builder>,
    /// True if they run in a network namespace, where they create taps.
    pub(crate) taps: bool,
}

/// The smallest guest, with a CPU model that both versions have.
fn guest(version: Version) -> Builder {
    let boot_sector = BootSector { fill_mib: 1, sweep_pages: 16, ..BootSector::default() };
    Qemu::builder(version).memory_mib(16).cpu("Nehalem").boot_sector(boot_sector)
}

fn new() -> Builder {
    guest(Version::V10_0)
}

/// QEMU 10.0 or 7.2 as a machine that both know.
fn common(version: Version) -> Builder {
    guest(version).machine("pc-q35-7.2")
}

/// A guest that uses the instructions of its CPU model.
fn popcnt() -> Builder {
    let boot_sector = BootSector { fill_mib: 1, sweep_pages: 16, uses_popcnt: true, ..BootSector::default() };
    new().boot_sector(boot_sector)
}

fn pair(name: &'static str, source: Builder, destination: Builder, runs: bool) -> Pair {
    Pair {
        name,
        source,
        destination,
        runs,
        is_short: false,
        source_settings: &[],
        destination_settings: &[],
        third: None,
        taps: false,
    }
}

/// Pair that differs in these arguments only, separated by spaces.
fn args(name: &'static str, source: &str, destination: &str, runs: bool) -> Pair {
    pair(name, with(new(), source), with(new(), destination), runs)
}

fn with(builder: Builder, arguments: &str) -> Builder {
    builder.args(arguments.split_whitespace())
}

/// Pair that differs in the migration settings only.
fn settings(
    name: &'static str,
    source: &'static [&'static str],
    destination: &'static [&'static str],
    runs: bool,
) -> Pair {
    Pair { source_settings: source, destination_settings: destination, ..pair(name, new(), new(), runs) }
}

fn short(pair: Pair) -> Pair {
    Pair { is_short: true, ..pair }
}

const BLK: &str = "-blockdev null-co,node-name=d0,size=1048576 -device virtio-blk-pci,drive=d0";

/// All pairs.
pub(crate) fn pairs(disks: &Disks) -> Vec<Pair> {
    [machines(), processors(), devices(), nics(), drives(disks), migration()].into_iter().flatten().collect()
}

fn machines() -> Vec<Pair> {
    use Version::{V7_2, V10_0};
    let slots = "-m 16M,slots=2,maxmem=1G";
    vec![
        pair("alike, 10.0", new(), new(), true),
        pair("alike, 7.2", guest(V7_2), guest(V7_2), true),
        short(pair("7.2 to 10.0", common(V7_2), common(V10_0), true)),
        pair("10.0 to 7.2", common(V10_0), common(V7_2), true),
        short(pair("machine q35 to i440fx", new(), new().machine("pc-i440fx-10.0"), false)),
        pair("machine version 10.0 to 9.2", new(), new().machine("pc-q35-9.2"), false),
        pair("machine version 7.2 to 7.1, QEMU 7.2", guest(V7_2), guest(V7_2).machine("pc-q35-7.1"), false),
        pair("memory 16 to 32 MiB", new(), new().memory_mib(32), false),
        pair("memory 32 to 16 MiB", new().memory_mib(32), new(), false),
        pair("without to with memory slots", new(), with(new(), slots), false),
        pair(
            "7.2 to 10.0, virtio-net",
            with(common(V7_2), "-device virtio-net-pci"),
            with(common(V10_0), "-device virtio-net-pci"),
            true,
        ),
        pair(
            "10.0 to 7.2, virtio-net",
            with(common(V10_0), "-device virtio-net-pci"),
            with(common(V7_2), "-device virtio-net-pci"),
            true,
        ),
        pair("7.2 to 10.0, virtio-blk", with(common(V7_2), BLK), with(common(V10_0), BLK), true),
        pair("10.0 to 7.2, virtio-blk", with(common(V10_0), BLK), with(common(V7_2), BLK), true),
    ]
}

/// Pairs with the newest QEMU, which not every machine has. None with virtio runs on: the verdict on that is
/// "could not tell", since QEMU 11.1 cannot be queried for negotiated features.
pub(crate) fn newest() -> Vec<Pair> {
    [plain_newest(), larger_virtqueues()].into_iter().flatten().collect()
}

/// Guests with larger virtqueues than the newest QEMU gives its devices.
fn larger_virtqueues() -> Vec<Pair> {
    use Version::{Newest, Stable};
    let as_10_0 = |version| guest(version).machine("pc-q35-10.0");
    let blk = |size: u32| with(guest(Newest), &format!("{BLK},queue-size={size}"));
    let alike = |name, arguments| {
        pair(name, with(as_10_0(Stable), arguments), with(as_10_0(Newest), arguments), false)
    };
    let mut pairs = vec![pair("newest, disk's ring 256 to 64", blk(256), blk(64), false)];
    if Version::Stable.enlarges_virtqueues().unwrap() {
        pairs.extend([
            short(alike("10.0 of Debian 13 to newest, virtio-rng", "-device virtio-rng-pci")),
            alike("10.0 of Debian 13 to newest, legacy rng", "-device virtio-rng-pci,disable-modern=on"),
            alike("10.0 of Debian 13 to newest, virtio-net", "-device virtio-net-pci,romfile="),
            alike("10.0 of Debian 13 to newest, serial", "-device virtio-serial-pci"),
            alike("10.0 of Debian 13 to newest, balloon", "-device virtio-balloon-pci"),
        ]);
    }
    pairs
}

fn plain_newest() -> Vec<Pair> {
    use Version::{Newest, Stable, V7_2, V10_0};
    let as_10_0 = |version| guest(version).machine("pc-q35-10.0");
    let lanes: &[&str] = &["+multifd", "multifd-channels=2"];
    vec![
        pair("alike, newest", guest(Newest), guest(Newest), true),
        short(pair("10.0 of Debian 13 to newest", as_10_0(Stable), as_10_0(Newest), true)),
        pair("newest to 10.0 of Debian 13", as_10_0(Newest), as_10_0(Stable), true),
        pair("10.0 to newest", as_10_0(V10_0), as_10_0(Newest), true),
        pair("newest to 10.0", as_10_0(Newest), as_10_0(V10_0), true),
        pair("7.2 to newest", common(V7_2), common(Newest), true),
        pair("newest to 7.2", common(Newest), common(V7_2), true),
        short(pair("machine newest to 10.0", guest(Newest), as_10_0(Newest), false)),
        pair("newest, e1000 is missing", with(guest(Newest), "-device e1000,romfile="), guest(Newest), false),
        Pair {
            source_settings: lanes,
            destination_settings: lanes,
            ..pair("multifd on, both, 10.0 to newest", as_10_0(V10_0), as_10_0(Newest), true)
        },
    ]
}

fn processors() -> Vec<Pair> {
    let smp = |count: u32, topology: &str| with(new().processors(count), topology);
    vec![
        // Another pair needs Linux (`linux.rs`): this guest has no ACPI, so it would not notice.
        short(pair("2 to 1 processors", new().processors(2), new(), false)),
        pair("2 sockets to 2 cores", smp(2, "-smp 2,sockets=2"), smp(2, "-smp 2,cores=2"), true),
        pair(
            "2x3 cores to 6 cores (APIC ids)",
            smp(6, "-smp 6,sockets=2,cores=3"),
            smp(6, "-smp 6,sockets=1,cores=6"),
            false,
        ),
        short(pair("Nehalem to Conroe, which has no popcnt", popcnt(), popcnt().cpu("Conroe"), false)),
        pair("Nehalem to Nehalem,-popcnt", popcnt(), popcnt().cpu("Nehalem,-popcnt"), false),
        pair("Conroe to Nehalem", new().cpu("Conroe"), new(), true),
        pair("Nehalem to Westmere", popcnt(), popcnt().cpu("Westmere"), true),
    ]
}

fn devices() -> Vec<Pair> {
    let port = "-device pcie-root-port,id=rp1,chassis=1,addr=6";
    vec![
        args("e1000 is missing", "-device e1000,romfile=", "", false),
        short(args(
            "e1000 in another slot",
            "-device e1000,addr=5,romfile=",
            "-device e1000,addr=6,romfile=",
            false,
        )),
        args("e1000 to rtl8139", "-device e1000,romfile=", "-device rtl8139,romfile=", false),
        args("virtio-rng is missing", "-device virtio-rng-pci", "", false),
        short(args("one more e1000", "", "-device e1000", true)),
        args("one more virtio-rng", "", "-device virtio-rng-pci", true),
        args(
            "on a port to without one",
            &format!("{port} -device virtio-rng-pci,bus=rp1"),
            "-device virtio-rng-pci,addr=6",
            false,
        ),
        args(
            "on a port, both",
            &format!("{port} -device virtio-rng-pci,bus=rp1"),
            &format!("{port} -device virtio-rng-pci,bus=rp1"),
            true,
        ),
        args("usb-tablet is missing", "-device qemu-xhci -device usb-tablet", "-device qemu-xhci", false),
        args("VGA memory 8 to 16 MiB", "-device VGA,vgamem_mb=8", "-device VGA,vgamem_mb=16", false),
        args("isa-serial is missing", "-device isa-serial", "", false),
        pair("hpet is off there", new(), new().machine("pc-q35-10.0,hpet=off"), false),
        short(args("nvme, which QEMU cannot send", &nvme(), &nvme(), false)),
        args("option ROM is missing", "-device virtio-net-pci", "-device virtio-net-pci,romfile=", false),
    ]
}

fn nvme() -> String {
    "-blockdev null-co,node-name=d0,size=1048576 -device nvme,drive=d0,serial=1".into()
}

fn nics() -> Vec<Pair> {
    let nic = |options: &str| format!("-device virtio-net-pci{options}");
    let user = "-netdev user,id=n0 -device virtio-net-pci,netdev=n0";
    let tap = |queues: u32| {
        format!(
            "-netdev tap,id=n0,ifname=t%,script=no,downscript=no,queues={queues} -device virtio-net-pci,netdev=n0,mq=on,romfile="
        )
    };
    let taps = |name, source: &str, destination: &str, runs| Pair {
        taps: true,
        ..args(name, &source.replace('%', "a"), &destination.replace('%', "b"), runs)
    };
    vec![
        short(args("NIC's ring 256 to 1024", &nic(",rx_queue_size=256"), &nic(",rx_queue_size=1024"), true)),
        args("NIC's ring 1024 to 256", &nic(",rx_queue_size=1024"), &nic(",rx_queue_size=256"), true),
        args("another MAC", &nic(",mac=52:54:00:00:00:01"), &nic(",mac=52:54:00:00:00:02"), true),
        args("another MTU", &nic(",host_mtu=1500"), &nic(",host_mtu=1400"), true),
        args("NIC's vectors 3 to 6", &nic(",vectors=3"), &nic(",vectors=6"), false),
        args("an unused feature off", &nic(""), &nic(",gso=off"), true),
        args("disable-legacy", &nic(""), &nic(",disable-legacy=on"), false),
        args("disable-modern", &nic(""), &nic(",disable-modern=on"), false),
        short(args("-netdev user to none", user, &nic(""), false)),
        args("none to -netdev user", &nic(""), user, true),
        args("disk's queues 1 to 4", &format!("{BLK},num-queues=1"), &format!("{BLK},num-queues=4"), false),
        args(
            "disk's ring 256 to 64",
            &format!("{BLK},queue-size=256"),
            &format!("{BLK},queue-size=64"),
            true,
        ),
        taps("taps with 1 queue, both", &tap(1), &tap(1), true),
        taps("taps with 2 queues, both", &tap(2), &tap(2), true),
        taps("NIC's queues 2 to 1", &tap(2), &tap(1), false),
        taps("NIC's queues 1 to 2", &tap(1), &tap(2), false),
        taps("tap to no backend (vnet header)", &tap(1), "-device virtio-net-pci,mq=on,romfile=", false),
    ]
}

fn drives(disks: &Disks) -> Vec<Pair> {
    let drive = |format: &str, file: &Path| {
        format!(
            "-blockdev {format},node-name=d0,file.driver=file,file.filename={} -device virtio-blk-pci,drive=d0,id=disk0",
            file.display()
        )
    };
    let [a, b, c] = ["a", "b", "c"].map(|name| drive("raw", &disks.raw(name)));
    let qcow2 = drive("qcow2", &disks.qcow2("d"));
    let cd = |medium: &str| {
        format!("-drive if=none,id=cd,media=cdrom,readonly=on{medium} -device ide-cd,drive=cd")
    };
    let medium = format!(",file={}", disks.raw("cd").display());
    vec![
        short(args("a shared disk", &a, &a, true)),
        short(args("a shared disk, qcow2", &qcow2, &qcow2, true)),
        args("another disk", &a, &b, true),
        short(Pair {
            third: Some(with(new(), &c)),
            ..args("a disk that another guest locks", &a, &c, false)
        }),
        args("a CD that is not in there", &cd(&medium), &cd(""), true),
    ]
}

fn migration() -> Vec<Pair> {
    let uuid = |last: &str| with(new(), &format!("-uuid 5e1fd0d2-0000-4000-8000-00000000000{last}"));
    let lanes: &[&str] = &["+multifd", "multifd-channels=2"];
    vec![
        short(settings("multifd on at the source only", &["+multifd"], &[], false)),
        settings("multifd on at the destination only", &[], &["+multifd"], false),
        settings("multifd on, both", lanes, lanes, true),
        settings("multifd-channels 2 and 4", lanes, &["+multifd", "multifd-channels=4"], false),
        settings(
            "multifd-compression zlib and none",
            &["+multifd", "multifd-compression=zlib"],
            &["+multifd"],
            false,
        ),
        settings("postcopy-ram on at the source only", &["+postcopy-ram"], &[], false),
        settings("postcopy-ram on at the destination only", &[], &["+postcopy-ram"], true),
        settings("return-path on at the source only", &["+return-path"], &[], true),
        settings("xbzrle on at the source only", &["+xbzrle"], &[], true),
        settings("switchover-ack on at the source only", &["+return-path", "+switchover-ack"], &[], false),
        pair("another uuid, no lanes", uuid("1"), uuid("2"), true),
        Pair {
            source_settings: &["+multifd"],
            destination_settings: &["+multifd"],
            ..pair("another uuid, lanes", uuid("1"), uuid("2"), false)
        },
        Pair {
            source_settings: &["+validate-uuid"],
            ..short(pair("another uuid, validate-uuid", uuid("1"), uuid("2"), false))
        },
    ]
}
