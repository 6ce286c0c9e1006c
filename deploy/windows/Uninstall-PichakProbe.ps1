<#
.SYNOPSIS
    Removes the scheduled task and its script. The result files stay unless -Results is given.
#>
[CmdletBinding(SupportsShouldProcess = $true)]
param(
    [string] $OutFolder = (Join-Path $env:LOCALAPPDATA 'Pichak\probes'),

    [switch] $Results
)

Set-StrictMode -Version 3.0
$ErrorActionPreference = 'Stop'
$TaskName = 'Pichak probe'

if (Get-ScheduledTask -TaskName $TaskName -ErrorAction SilentlyContinue) {
    if ($PSCmdlet.ShouldProcess($TaskName, 'stop and remove the scheduled task')) {
        Stop-ScheduledTask -TaskName $TaskName
        Unregister-ScheduledTask -TaskName $TaskName -Confirm:$false
    }
}
else {
    Write-Output "There is no scheduled task called '$TaskName'."
}
$installed = Join-Path (Split-Path -Parent $OutFolder) 'Invoke-PichakProbe.ps1'
if (Test-Path -LiteralPath $installed) {
    Remove-Item -LiteralPath $installed
}
if ($Results -and (Test-Path -LiteralPath $OutFolder)) {
    Remove-Item -LiteralPath $OutFolder -Recurse
}
