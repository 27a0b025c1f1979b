//! Landlock: files below named paths, TCP ports by number.

use std::path::PathBuf;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, NetPort, RestrictSelfAttr as _, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope, path_beneath_rules,
};

use super::{Policy, Ports, directory};

/// Linux 6.12: files, devices, TCP ports, signals and abstract sockets. An older kernel holds what it knows of it.
const KNOWN: ABI = ABI::V6;

/// Confines this thread and those that it starts, and from Linux 7.0 on those that there are. Says what this kernel lacks.
pub(super) fn confine(policy: &Policy) -> Result<(), String> {
    let lack = |error: RulesetError| format!("landlock: {error}; files and ports are not confined");
    let threads = std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
    let ruleset = ruleset(policy).and_then(|ruleset| ruleset.all_threads(true)).map_err(lack)?;
    let status = ruleset.restrict_self().map_err(lack)?;
    match status.ruleset {
        _ if threads > 1 && !status.all_threads => Err(format!(
            "landlock: {} threads were there before it, and are not confined; that is a bug to be reported",
            threads - 1
        )),
        RulesetStatus::FullyEnforced => Ok(()),
        RulesetStatus::PartiallyEnforced => {
            tracing::info!("this kernel knows a part of landlock's rules, and holds that part");
            Ok(())
        }
        RulesetStatus::NotEnforced => {
            Err("this kernel has no landlock (Linux 5.13, CONFIG_SECURITY_LANDLOCK and `landlock` \
             in lsm=): files and ports are confined by nothing but the user's rights"
                .into())
        }
    }
}

fn ruleset(policy: &Policy) -> Result<RulesetCreated, RulesetError> {
    let mut ruleset =
        Ruleset::default().handle_access(AccessFs::from_all(KNOWN))?.scope(Scope::from_all(KNOWN))?;
    for (ports, access) in [(&policy.bind, AccessNet::BindTcp), (&policy.connect, AccessNet::ConnectTcp)] {
        if *ports != Ports::Any {
            ruleset = ruleset.handle_access(access)?;
        }
    }
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let write = AccessFs::from_all(KNOWN)
        & !(AccessFs::Execute | AccessFs::MakeChar | AccessFs::MakeBlock | AccessFs::IoctlDev);
    let mut ruleset = ruleset.create()?;
    // The directory is opened to be locked, and a stale socket replaced.
    let listen = AccessFs::MakeSock | AccessFs::RemoveFile | AccessFs::ReadDir;
    let [remove, listening]: [Vec<PathBuf>; 2] =
        [&policy.remove, &policy.listen].map(|paths| paths.iter().map(|path| directory(path)).collect());
    let paths: [(&[PathBuf], BitFlags<AccessFs>); 4] = [
        (&policy.read, read),
        (&policy.write, write),
        (&remove, AccessFs::RemoveFile.into()),
        (&listening, listen),
    ];
    for (paths, access) in paths {
        // What is not there is left out: it cannot be opened anyway, and whoever wants it says so better.
        ruleset = ruleset.add_rules(path_beneath_rules(paths, access))?;
    }
    for (ports, access) in [(&policy.bind, AccessNet::BindTcp), (&policy.connect, AccessNet::ConnectTcp)] {
        if let Ports::Only(ports) = ports {
            ruleset = ruleset
                .add_rules(ports.iter().map(|port| Ok::<_, RulesetError>(NetPort::new(*port, access))))?;
        }
    }
    Ok(ruleset)
}
