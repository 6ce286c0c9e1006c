<#
.SYNOPSIS
    Installs a scheduled task that measures this machine again and again, without Ray and without a
    network (`pichak agent probe`), inside WSL2.

.DESCRIPTION
    The agent's jobs run under a process that keeps hold of their whole tree, which needs a Linux
    kernel; WSL2 has one, and NVIDIA's driver for Windows serves CUDA inside it. The task writes one
    file a run into -OutFolder; `pichak import *.mpk` on any machine puts them beside the others.

    Nothing is installed inside WSL2 by this script: do that once before,
        wsl --install -d Ubuntu
        wsl -d Ubuntu -- python3 -m venv ~/pichak
        wsl -d Ubuntu -- ~/pichak/bin/pip install 'pichak-fleet[torch]'

.PARAMETER Hours
    How many hours lie between two runs.

.PARAMETER Distribution
    The WSL distribution that has pichak; without it the default one.

.PARAMETER Pichak
    The command inside that distribution.

.PARAMETER OutFolder
    Where the result files go, on Windows.

.PARAMETER Keep
    How many result files are kept.

.PARAMETER ProbeOptions
    More options of `pichak agent probe`.

.EXAMPLE
    .\Install-PichakProbe.ps1 -Hours 24 -ProbeOptions '--seq-len 1024 --device all'

.EXAMPLE
    .\Uninstall-PichakProbe.ps1
#>
[CmdletBinding(SupportsShouldProcess = $true)]
param(
    [ValidateRange(1, 720)]
    [int] $Hours = 24,

    [ValidatePattern('^[A-Za-z0-9._-]*$')]
    [string] $Distribution = '',

    [ValidatePattern('^[A-Za-z0-9._~/-]+$')]
    [string] $Pichak = '~/pichak/bin/pichak',

    [string] $OutFolder = (Join-Path $env:LOCALAPPDATA 'Pichak\probes'),

    [ValidateRange(1, 10000)]
    [int] $Keep = 100,

    [ValidatePattern('^[A-Za-z0-9 ._=:,/-]*$')]
    [string] $ProbeOptions = '--seq-len 1024'
)

Set-StrictMode -Version 3.0
$ErrorActionPreference = 'Stop'
$TaskName = 'Pichak probe'

if (-not (Get-Command wsl.exe -ErrorAction SilentlyContinue)) {
    throw 'wsl.exe is not there: `wsl --install` installs WSL2, where the agent runs.'
}

$inDistribution = @()
if ($Distribution) {
    $inDistribution = @('-d', $Distribution)
}

# A shell expands the ~ of $Pichak; the pattern above leaves nothing else in it to expand.
& wsl.exe @inDistribution --exec sh -c "$Pichak --version" | Out-Null
if ($LASTEXITCODE -ne 0) {
    throw "$Pichak does not run inside WSL: see this script's help for how to install it there."
}

$runner = Join-Path $PSScriptRoot 'Invoke-PichakProbe.ps1'
if (-not (Test-Path -LiteralPath $runner)) {
    throw "$runner is missing: keep the scripts of this folder together."
}

if ($PSCmdlet.ShouldProcess($TaskName, 'register the scheduled task')) {
    New-Item -ItemType Directory -Force -Path $OutFolder | Out-Null
    $installed = Join-Path (Split-Path -Parent $OutFolder) 'Invoke-PichakProbe.ps1'
    Copy-Item -LiteralPath $runner -Destination $installed -Force

    $arguments = @(
        '-NoProfile', '-NonInteractive', '-ExecutionPolicy', 'Bypass',
        '-File', "`"$installed`"",
        '-OutFolder', "`"$OutFolder`"",
        '-Pichak', "`"$Pichak`"",
        '-Keep', $Keep,
        '-ProbeOptions', "`"$ProbeOptions`""
    )
    if ($Distribution) {
        $arguments += @('-Distribution', $Distribution)
    }
    $action = New-ScheduledTaskAction -Execute 'powershell.exe' -Argument ($arguments -join ' ')
    $trigger = New-ScheduledTaskTrigger -Once -At (Get-Date).AddMinutes(5) `
        -RepetitionInterval (New-TimeSpan -Hours $Hours) `
        -RandomDelay (New-TimeSpan -Minutes 10)
    # One at a time, ended after two hours, and not while the machine runs on its battery.
    $settings = New-ScheduledTaskSettingsSet -MultipleInstances IgnoreNew -StartWhenAvailable `
        -ExecutionTimeLimit (New-TimeSpan -Hours 2)
    # The user's own account, without its password and without more rights than it has.
    $principal = New-ScheduledTaskPrincipal -UserId "$env:USERDOMAIN\$env:USERNAME" `
        -LogonType Interactive -RunLevel Limited
    Register-ScheduledTask -TaskName $TaskName -Action $action -Trigger $trigger `
        -Settings $settings -Principal $principal -Force | Out-Null
    Write-Output "Every $Hours h this machine is measured into $OutFolder, while you are logged on."
    Write-Output "Start-ScheduledTask -TaskName '$TaskName' measures it now."
}
